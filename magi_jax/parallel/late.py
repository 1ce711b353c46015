"""Late queries: rows that need keys of other ranks, gathered and computed at once when all their keys are
there. No other row waits, and no row is merged from partial results.

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
        """Attention of late queries, put where it belongs.

        Args:
            attend: `Implementation.forward` with its options.
            q: ``[T, N, H]`` of the rank.
            keys_values: as `take` gives them.
            results: ``out [T, N, Hv]`` and ``lse [T, N]`` of all other queries.

        Returns:
            ``out`` and ``lse`` of all, then what ``attend`` gives of late queries beside these.
        """
        (q,) = self._rows_of(q)
        out, lse, *more = attend(q, *keys_values, self.tables.calc, out_dtype=results[0].dtype)
        return (self._put(results[0], out), self._put(results[1], lse)), more

    def differentiate(
        self, gradients: Callable, rows: tuple[jax.Array, ...], pending: InFlight | None
    ) -> tuple[jax.Array, InFlight]:
        """Gradients of the same.

        Args:
            gradients: ``(rows, keys_values, table) -> (dq, dk, dv)``.
            rows: what ``gradients`` takes as rows, of all queries of the rank.
            pending: what `fetch` gave.

        Returns:
            dq of late queries for `add_gradient`, and dK and dV on the way to their owners.
        """
        keys_values, rows = self.take(pending, rows)
        dq, *dkv = gradients(self._rows_of(*rows), keys_values, self.tables.calc)
        shared = self.tables.shared
        comm = self.tables.comm if shared is None else shared.comm
        return dq, self.link.start_reduce(dkv, comm)

    @property
    def is_all_of_its_keys(self) -> bool:
        """Whether keys whose gradients return have none from elsewhere."""
        return self.tables.shared is not None

    def add_gradient(self, dq: jax.Array, late_dq: jax.Array) -> jax.Array:
        """Gradient of q ``[T, N, H]``, float32, with what late queries add."""
        return dq.at[self.tables.rows].add(late_dq, mode="drop", unique_indices=True)

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

    def _rows_of(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Late rows of each array; zeros past the last of them."""
        return tuple(
            x.at[self.tables.rows].get(mode="fill", fill_value=0, unique_indices=True)
            for x in arrays
        )

    def _put(self, whole: jax.Array, rows: jax.Array) -> jax.Array:
        return whole.at[self.tables.rows].set(rows, mode="drop", unique_indices=True)
