"""Static sizes of a plan: everything that a compiled program may depend on.

A spec has *identities*, which two plans must share to be served by one program (ranks, sequence
length, tile size), and *capacities*, which may only be large enough. Capacities are rounded up to
buckets, so that masks of similar size share a spec and a program is compiled once for them.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

from magi_jax.plan.comm_spec import AnyCommSpec, CommSpec, TwoLevelSpec
from magi_jax.plan.part_specs import LateSpec, StagesSpec, TableSpec, TravelSpec
from magi_jax.plan.room import roomy_move, roomy_stages, roomy_travel
from magi_jax.plan.sizes import (
    MIN_SEGMENTS,
    Sizes,
    bucket,
    capacity,
    entries_factor,
    require_growth,
    union_of,
)

# Where the keys of a plan are: with its queries, in another plan's dispatch, or whole on every rank.
OWN_KEYS, OTHER_KEYS, REPLICATED_KEYS = "own", "other", "replicated"


@dataclass(frozen=True)
class PlanSpec(Sizes):
    """Every static size of an `AttentionPlan`; hashable, and equal specs compile once.

    Attributes:
        cp_size: number of ranks.
        seq_len: tokens of the sequence; a mask may be shorter.
        chunk_size: tokens of a dispatch chunk.
        local_len: rows of each rank after dispatch.
        tile_size: rows of a tile in every slice table.
        roll_shifts: shifts that `AttentionPlan.rolls` holds.
        segments: capacity ``G`` of the dispatch.
        calc: sizes of the slice table of each stage; stage 0 is local.
        comm: sizes of the cast that feeds stage ``i + 1``, in one step or in two.
        transfer: sizes of the transfer from the contiguous layout to the dispatched one.
        rolls: sizes of each roll.
        keys: `OWN_KEYS`, `OTHER_KEYS` or `REPLICATED_KEYS`; ``calc[0].k_len`` are the rows of each rank.
        backward: sizes of the stages of the backward pass; None where it shares those above.
        travel: sizes of what travelling queries need; None where none travel.
        late: sizes of what late queries need; None where none are late.
    """

    cp_size: int
    seq_len: int
    chunk_size: int
    local_len: int
    tile_size: int
    roll_shifts: tuple[int, ...]
    segments: int = dataclasses.field(metadata=capacity(MIN_SEGMENTS))
    calc: tuple[TableSpec, ...]
    comm: tuple[AnyCommSpec, ...]
    transfer: CommSpec
    rolls: tuple[CommSpec, ...]
    keys: str = OWN_KEYS
    backward: StagesSpec | None = None
    travel: TravelSpec | None = None
    late: LateSpec | None = None

    @property
    def num_remote_stages(self) -> int:
        """Stages of the forward pass whose keys come from other ranks."""
        return len(self.comm)

    @property
    def forward_stages(self) -> StagesSpec:
        """Sizes of the stages of the forward pass."""
        return StagesSpec(self.calc, self.comm, self.late)

    @property
    def backward_stages(self) -> StagesSpec:
        """Sizes of the stages of the backward pass, shared or not."""
        return self.forward_stages if self.backward is None else self.backward

    @property
    def attention_comm(self) -> tuple[AnyCommSpec, ...]:
        """Sizes of all transfers of attention: stages of both directions, and travelling queries."""
        backward = () if self.backward is None else self.backward.comm
        travel = () if self.travel is None else (self.travel.comm,)
        return *self.comm, *backward, *travel

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of a node where rows cross between nodes once and move on inside; None where they take
        one step.
        """
        found = [spec for spec in self.attention_comm if isinstance(spec, TwoLevelSpec)]
        return found[0].ranks_per_node if found else None

    def shortfall(self, other: "PlanSpec", path: str = "spec") -> str | None:
        """Says where this spec is too small for ``other`` or of another kind; None when it covers
        it. Stages that only this spec has stay empty.
        """
        mine, found = self.ranks_per_node, other.ranks_per_node
        if mine is None and found is not None:
            return f"{path} has transfers in one step, but two are needed"
        if self.backward is not None:
            other = dataclasses.replace(other, backward=other.backward_stages)
        if mine is not None:
            other = other.in_two(mine, beside=self)
        return super().shortfall(other, path)

    def _union_of_two(self, other: "PlanSpec") -> "PlanSpec":
        """With the larger number of stages of each direction, and with transfers in two steps where either
        has them.
        """
        mine = self
        if (mine.backward is None) != (other.backward is None):
            both = (dataclasses.replace(s, backward=s.backward_stages) for s in (mine, other))
            mine, other = both
        per_node = mine.ranks_per_node or other.ranks_per_node
        if per_node is not None:
            mine, other = mine.in_two(per_node, other), other.in_two(per_node, mine)
        return union_of(mine, other, "spec", capacity=False)

    def in_two(self, ranks_per_node: int, beside: "PlanSpec") -> "PlanSpec":
        """The same with room for the transfers of attention in two steps; those that take two stay as
        they are, and so do those of rows of own nodes where ``beside`` has none in two.
        """

        def split(stages, others):
            pairs = itertools.zip_longest(stages.comm, others.comm[: len(stages.comm)])
            comm = (
                c if c.is_near and (other is None or other.is_near) else c.in_two(ranks_per_node)
                for c, other in pairs
            )
            return dataclasses.replace(stages, comm=tuple(comm))

        return dataclasses.replace(
            split(self, beside),
            backward=self.backward and split(self.backward, beside.backward_stages),
            travel=self.travel
            and dataclasses.replace(self.travel, comm=self.travel.comm.in_two(ranks_per_node)),
        )

    def scaled(self, factor: float) -> "PlanSpec":
        """The same with room for ``factor`` times as many rows, and for more entries of tables
        (`sizes.entries_factor`): for masks not seen yet.

        Buffers whose size follows from the dispatch keep it, no rank gets room for more rows than others
        hold and no pair for more than one of them holds, and segments and pieces are enough for whole
        chunks in any order.

        Raises:
            ValueError: ``factor`` is less than 1, which would leave no room for the plan itself.
        """
        require_growth(factor)
        entries = entries_factor(factor)
        num_chunks = -(-self.seq_len // self.chunk_size)
        chunks = -(-num_chunks // self.cp_size)  # of a rank, at most

        def moved(spec: CommSpec, factor: float) -> CommSpec:
            # A chunk meets at most two ranks of the contiguous layout, and three chunks when rolled.
            return roomy_move(spec, factor, max(3 * chunks, math.ceil(spec.pieces * entries)))

        rows = factor, self.local_len
        forward = roomy_stages(self.forward_stages, *rows)
        return dataclasses.replace(
            self,
            segments=bucket(max(chunks, math.ceil(self.segments * entries)), MIN_SEGMENTS),
            calc=forward.calc,
            comm=forward.comm,
            late=forward.late,
            backward=None if self.backward is None else roomy_stages(self.backward, *rows),
            travel=None if self.travel is None else roomy_travel(self.travel, factor),
            transfer=moved(self.transfer, factor),
            # A roll moves few rows of each piece: their number goes with that of the entries.
            rolls=tuple(moved(spec, entries) for spec in self.rolls),
        )
