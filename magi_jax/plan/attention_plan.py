"""`AttentionPlan`: the solvers' results as one pytree."""

import dataclasses
import functools
from dataclasses import dataclass

import jax

from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.tables import Array, CommMeta, DispatchMeta, SliceTable, local_part


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("dispatch", "calc", "comm", "rolls"),
    meta_fields=("spec",),
    drop_fields=("planning_ms",),
)
@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Who holds which tokens, what crosses ranks, and what each rank computes in each stage.

    Every leaf is int32 with a leading ``[cp]`` axis, so ``P("cp")`` shards all of them; the plan is
    a value that may be closed over or passed to a jitted step next to the batch.

    Attributes:
        dispatch: where tokens live.
        calc: slice table of each stage; stage 0 reads local keys, stage ``i + 1`` what ``comm[i]``
            brought.
        comm: rows that stage ``i + 1`` receives.
        rolls: transfer of each of ``spec.roll_shifts``.
        spec: static sizes.
        planning_ms: time that planning took, for reports; not part of the tree, so None after any
            transformation of it.
    """

    dispatch: DispatchMeta
    calc: tuple[SliceTable, ...]
    comm: tuple[CommMeta, ...]
    rolls: tuple[CommMeta, ...]
    spec: PlanSpec
    planning_ms: float | None = dataclasses.field(default=None, compare=False)

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return self.spec.cp_size

    @property
    def positions(self) -> Array:
        """Global position of each local row, int32 ``[cp, local_len]``, -1 = padding."""
        return self.dispatch.positions

    def local(self, rank: Array) -> "AttentionPlan":
        """The part of one rank, without leading axes, whether the leaves arrive sharded or whole.

        Args:
            rank: index along the cp axis, usually ``jax.lax.axis_index``.
        """
        return local_part(self, rank, self.cp_size, lead=self.positions.ndim - 1)
