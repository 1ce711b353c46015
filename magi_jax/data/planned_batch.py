"""A batch with its plans, in few arrays: what a host sends to devices in every step."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.plan import AttentionPlan


@dataclass(frozen=True)
class TableLayout:
    """Where the leaves of plans lie in an array of tables. Hashable.

    Attributes:
        structure: of the plans.
        shapes: of every leaf, without the axes of replicas and ranks.
    """

    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("packed", "tables"), meta_fields=("layout",)
)
@dataclass(frozen=True)
class PlannedBatch:
    """A batch of R sequences in dispatched order, with what attention needs. A pytree.

    The tables of all plans are one array, because sending an array to devices costs the host some
    0.1 ms whatever its size, and a plan has some sixty.

    Attributes:
        packed: the batch that was planned, of the same kind and with the same fields, each
            ``[R, cp * local_len, ...]``.
        tables: all leaves of all plans, int32 ``[R, cp, n]``.
        layout: where each leaf lies in the tables; static.

    Shard all of it with ``P("dp", "cp")``.
    """

    packed: Any
    tables: Any
    layout: TableLayout

    @classmethod
    def of(cls, packed: Any, plans: Sequence[AttentionPlan]) -> "PlannedBatch":
        """Joins a batch with its plans, one per mask, stacked over the sequences."""
        leaves, structure = jax.tree.flatten(tuple(plans))
        rows = leaves[0].shape[:2]
        tables = np.concatenate([np.reshape(leaf, (*rows, -1)) for leaf in leaves], axis=-1)
        return cls(packed, tables, TableLayout(structure, tuple(x.shape[2:] for x in leaves)))

    @property
    def plans(self) -> tuple[AttentionPlan, ...]:
        """One plan per mask, stacked over the sequences: leaves ``[R, cp, ...]``.

        Made anew from the tables at each call, which is meant for code under `jax.jit`; on the host
        leaves are views. Axes in front of those of the tables stay in front of those of the leaves.
        """
        ends = np.cumsum([math.prod(shape) for shape in self.layout.shapes])
        xp: Any = np if isinstance(self.tables, np.ndarray) else jnp
        leaves = [
            xp.reshape(self.tables[..., end - math.prod(shape) : end], (*self._rows, *shape))
            for shape, end in zip(self.layout.shapes, ends.tolist(), strict=True)
        ]
        plans: tuple[AttentionPlan, ...] = jax.tree.unflatten(self.layout.structure, leaves)
        return plans

    @property
    def _rows(self) -> tuple[int, ...]:
        """Axes of replicas and ranks, and what a caller has stacked in front of them."""
        shape: tuple[int, ...] = self.tables.shape
        return shape[:-1]
