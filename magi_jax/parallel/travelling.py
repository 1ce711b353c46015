"""Queries that go to the owners of their keys: keys stay, partial results return and are merged.

For rows that see nearly everything this moves few query rows where the alternative would move nearly all
keys; which rows they are is the plan's affair. Everything here runs where all mesh axes are manual, on the
arrays of one rank, and has no derivative, as in `stages`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from magi_jax.comm import cast_in_steps, reduce_in_steps
from magi_jax.ops.lse import merge
from magi_jax.parallel.pipeline import KeysValues, Link
from magi_jax.plan import TravelTables


@dataclass(frozen=True)
class Travel:
    """How queries travel.

    Attributes:
        tables: this rank's part of the plan's tables.
        link: how they, partial ``out`` and dQ move.
    """

    tables: TravelTables
    link: Link

    def send(self, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Rows ``[T, ...]`` of travelling queries, at the owners of their keys: ``[visitors, ...]``."""
        link = self.link
        return cast_in_steps(rows, self.tables.comm, link.axis_name, transport=link.transport)

    def attend(
        self, attend: Callable, visitors: tuple[jax.Array, ...], keys_values: KeysValues
    ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
        """Attention of those who came to this rank's keys.

        Args:
            attend: `Implementation.forward` with its options.
            visitors: queries, as `send` gives them.
            keys_values: of this rank.

        Returns:
            ``out [T, N, Hv]`` and ``lse [T, N]``, float32, of this rank's own queries over the keys of all
            others: 0 and -inf where none travel. Then what ``attend`` gives of visitors beside these.
        """
        (q,) = visitors
        out, lse, *more = attend(q, *keys_values, self.tables.calc, out_dtype=jnp.float32)
        return self._return((out, lse), "lse"), more

    def differentiate(
        self, gradients: Callable, visitors: tuple[jax.Array, ...], keys_values: KeysValues
    ) -> tuple[jax.Array, KeysValues]:
        """Gradients of the same.

        Args:
            gradients: ``(rows, keys_values, table) -> (dq, dk, dv)``.
            visitors: what ``gradients`` takes as rows, as `send` gives it.
            keys_values: of this rank.

        Returns:
            dq ``[T, N, H]`` of this rank's own queries, and the part of dK and dV of this rank's keys that
            visitors give; float32.
        """
        dq, dk, dv = gradients(visitors, keys_values, self.tables.calc)
        return self._return(dq, "sum"), (dk, dv)

    def _return(self, partials: Any, op: str) -> Any:
        return reduce_in_steps(
            partials,
            self.tables.comm,
            self.link.axis_name,
            op=op,
            wire_dtype=self.link.wire_dtype,
            transport=self.link.transport,
        )


def merge_returned(
    results: tuple[jax.Array, jax.Array], returned: tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys, from that over the keys that came here and that over the others."""
    return results if returned is None else merge(*results, *returned)
