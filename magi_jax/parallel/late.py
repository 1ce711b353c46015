"""Late queries: those that need keys of other ranks, computed at once when all their keys are there. No other
query waits, and none is merged from partial results. The call gets the rows of all queries and touches the
tiles of late ones alone.

Everything here runs where all mesh axes are manual, on the arrays of one rank, and has no derivative, as in
`stages`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from magi_jax.comm import InFlight
from magi_jax.parallel.overlap import barrier
from magi_jax.parallel.pipeline import KeysValues, Link
from magi_jax.plan import LateTables


@dataclass(frozen=True)
class Late:
    """How late queries are computed.

    Attributes:
        tables: this rank's part of the plan's tables.
        link: how keys, values and their gradients move.
        kept: keys and values that were fetched before; None to fetch them.
    """

    tables: LateTables
    link: Link
    kept: KeysValues | None = None

    def fetch(self, keys_values: KeysValues) -> InFlight | None:
        """Starts to bring all keys and values of late queries together, own ones too."""
        if self.kept is not None:
            return None
        return self.link.start_cast(keys_values, self.tables.comm)

    def take(self, pending: InFlight | None, done: Any) -> tuple[KeysValues, Any]:
        """What was fetched, and ``done``, results so far, which it waits for."""
        if pending is None:
            assert self.kept is not None, "nothing was fetched"
            return self.kept, done
        pending, done = barrier(pending, done)
        keys, values = self.link.finish(pending)
        return (keys, values), done

    def attend(
        self, attend: Callable, q: jax.Array, keys_values: KeysValues, results: tuple
    ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
        """Attention of late queries.

        Args:
            attend: `Implementation.forward` with its options.
            q: ``[T, N, H]`` of the rank.
            keys_values: as `take` gives them.
            results: ``out [T, N, Hv]`` and ``lse [T, N]`` of all other queries.

        Returns:
            ``out`` and ``lse`` of all, then what ``attend`` gives beside these.
        """
        out, lse, *more = attend(q, *keys_values, self.tables.calc, accumulate=results)
        return (out, lse), more

    def differentiate(
        self,
        gradients: Callable,
        rows: tuple[jax.Array, ...],
        pending: InFlight | None,
        dq: jax.Array | None,
    ) -> tuple[jax.Array, InFlight]:
        """Gradients of the same.

        Args:
            gradients: ``(rows, keys_values, table, dq=...) -> (dq, dk, dv)``.
            rows: what ``gradients`` takes as rows, of all queries of the rank.
            pending: what `fetch` gave.
            dq: what there is of dQ, None for nothing.

        Returns:
            dQ with what late queries add, and dK and dV on the way to their owners.
        """
        keys_values, (rows, dq) = self.take(pending, (rows, dq))
        dq, *dkv = gradients(rows, keys_values, self.tables.calc, dq=dq)
        shared = self.tables.shared
        comm = self.tables.comm if shared is None else shared.comm
        return dq, self.link.start_reduce(dkv, comm)

    @property
    def is_all_of_its_keys(self) -> bool:
        """Whether keys whose gradients return have none from elsewhere."""
        return self.tables.shared is not None

    def add_returned(self, dkv: list[jax.Array], returning: InFlight) -> list[jax.Array]:
        """Gradients of own keys and values with those that return."""
        returned = self.link.finish(returning)
        shared = self.tables.shared
        if shared is None:
            return [x + y for x, y in zip(dkv, returned, strict=True)]
        return [
            x.at[shared.rows].add(y.astype(x.dtype), mode="drop", unique_indices=True)
            for x, y in zip(dkv, returned, strict=True)
        ]
