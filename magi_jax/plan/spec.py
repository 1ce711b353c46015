"""Static sizes of a plan: everything that a compiled program may depend on.

A spec has *identities*, which two plans must share to be served by one program (ranks, sequence
length, tile size), and *capacities*, which may only be large enough. Capacities are rounded up to
buckets, so that masks of similar size share a spec and a program is compiled once for them.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

from magi_jax.plan.comm_spec import AnyCommSpec, CommSpec, TwoLevelSpec, grown
from magi_jax.plan.sizes import (
    MIN_BUFFER_ROWS,
    MIN_ENTRIES,
    MIN_SEGMENTS,
    Sizes,
    bucket,
    capacity,
    entries_factor,
    rounded,
    union_of,
)

# Where the keys of a plan are: with its queries, in another plan's dispatch, or whole on every rank.
OWN_KEYS, OTHER_KEYS, REPLICATED_KEYS = "own", "other", "replicated"


@dataclass(frozen=True)
class TableSpec(Sizes):
    """Sizes of one `SliceTable`.

    Attributes:
        q_len, k_len: rows of the query and key buffers that the table speaks of.
        tile_size: rows of a tile.
        slices: capacity ``A``.
        query_runs, query_ids: capacities ``R`` and ``I`` of ``by_query``.
        key_runs, key_ids: the same of ``by_key``.
    """

    q_len: int = dataclasses.field(metadata=capacity(None))
    k_len: int = dataclasses.field(metadata=capacity(None))
    tile_size: int
    slices: int = dataclasses.field(metadata=capacity(MIN_ENTRIES))
    query_runs: int = dataclasses.field(metadata=capacity(MIN_ENTRIES))
    query_ids: int = dataclasses.field(metadata=capacity(MIN_ENTRIES))
    key_runs: int = dataclasses.field(metadata=capacity(MIN_ENTRIES))
    key_ids: int = dataclasses.field(metadata=capacity(MIN_ENTRIES))


@dataclass(frozen=True)
class LateSpec(Sizes):
    """Sizes of a `LateTables`: the slice table, and the cast that fills the buffer of its keys.

    Attributes:
        calc, comm: as there.
        shared_rows: capacity ``E`` of its `SharedTables`; None where it has none.
    """

    calc: TableSpec
    comm: CommSpec
    shared_rows: int | None = dataclasses.field(default=None, metadata=capacity(MIN_BUFFER_ROWS))

    @property
    def shared_comm(self) -> CommSpec:
        """Sizes of the transfer of the `SharedTables`."""
        assert self.shared_rows is not None, "there are no shared keys"
        return dataclasses.replace(self.comm, src_rows=self.shared_rows)


@dataclass(frozen=True)
class StagesSpec(Sizes):
    """Sizes of the stages of one direction: ``calc``, ``comm`` and ``late`` as in `PlanSpec`."""

    calc: tuple[TableSpec, ...]
    comm: tuple[AnyCommSpec, ...]
    late: LateSpec | None = None

    @property
    def near(self) -> tuple[bool, ...]:
        """Whether each remote stage has rows of own nodes alone."""
        return tuple(spec.is_near for spec in self.comm)


@dataclass(frozen=True)
class TravelSpec(Sizes):
    """Sizes of a `TravelTables`: the slice table, and the cast of query rows that feeds it."""

    calc: TableSpec
    comm: AnyCommSpec


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

    def union(self, other: "PlanSpec") -> "PlanSpec":
        """The smallest spec that covers both, with the larger number of stages of each direction, and
        with transfers in two steps where either has them.

        Raises:
            ValueError: an identity differs; it is named.
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
        if not factor >= 1:
            raise ValueError(f"a spec is scaled by a factor of at least 1, got {factor}")
        entries = entries_factor(factor)
        num_chunks = -(-self.seq_len // self.chunk_size)
        chunks = -(-num_chunks // self.cp_size)  # of a rank, at most

        def moved(spec: CommSpec, factor: float = factor) -> CommSpec:
            # Whether tokens stay where they are differs most of all, from none to all of a rank's.
            self_rows = max(spec.self_rows, spec.src_rows)
            # A chunk meets at most two ranks of the contiguous layout, and three chunks when rolled.
            pieces = bucket(max(3 * chunks, math.ceil(spec.pieces * entries)), MIN_ENTRIES)
            return dataclasses.replace(
                grown(spec, factor), dst_rows=spec.dst_rows, self_rows=self_rows, pieces=pieces
            )

        def staged(stages: StagesSpec) -> StagesSpec:
            comm = tuple(grown(c, factor) for c in stages.comm)
            k_lens = (stages.calc[0].k_len, *(spec.dst_rows for spec in comm))
            tables = (_roomy(table, factor) for table in stages.calc)
            calc = (
                dataclasses.replace(t, q_len=self.local_len, k_len=n)
                for t, n in zip(tables, k_lens, strict=True)
            )
            late = None if stages.late is None else waited(stages.late)
            return StagesSpec(tuple(calc), comm, late)

        def waited(late: LateSpec) -> LateSpec:
            comm = grown(late.comm, factor)
            self_rows = min(bucket(math.ceil(late.comm.self_rows * factor)), comm.src_rows)
            arriving = bucket(math.ceil(late.comm.dst_rows * factor), MIN_BUFFER_ROWS)
            most = bucket(comm.cp_size * comm.src_rows, MIN_BUFFER_ROWS)  # own ones too
            comm = dataclasses.replace(
                comm,
                dst_rows=max(min(arriving, most), late.comm.dst_rows),
                self_rows=max(self_rows, late.comm.self_rows),
            )
            calc = _roomy(late.calc, factor)
            calc = dataclasses.replace(calc, q_len=self.local_len, k_len=comm.dst_rows)
            rows = late.shared_rows
            if rows is not None:
                rows = min(bucket(math.ceil(rows * factor), MIN_BUFFER_ROWS), comm.src_rows)
                rows = max(rows, late.shared_rows or 0)
            return LateSpec(calc, comm, rows)

        def travelled(travel: TravelSpec) -> TravelSpec:
            comm = grown(travel.comm, factor)
            calc = _roomy(travel.calc, factor)
            calc = dataclasses.replace(calc, q_len=comm.dst_rows, k_len=self.local_len)
            return TravelSpec(calc, comm)

        forward = staged(self.forward_stages)
        return dataclasses.replace(
            self,
            segments=bucket(max(chunks, math.ceil(self.segments * entries)), MIN_SEGMENTS),
            calc=forward.calc,
            comm=forward.comm,
            late=forward.late,
            backward=None if self.backward is None else staged(self.backward),
            travel=None if self.travel is None else travelled(self.travel),
            transfer=moved(self.transfer),
            # A roll moves few rows of each piece: their number goes with that of the entries.
            rolls=tuple(moved(spec, entries) for spec in self.rolls),
        )


def _roomy(table: TableSpec, factor: float) -> TableSpec:
    """Sizes of a table with room for what goes with ``factor`` times as many rows."""
    wide = rounded(table, None, entries_factor(factor))
    # Ids take 4 bytes, and there is one for each slice and tile that meet: no number differs more.
    twice = 2 if factor > 1 else 1
    return dataclasses.replace(
        wide,
        query_ids=bucket(twice * wide.query_ids, MIN_ENTRIES),
        key_ids=bucket(twice * wide.key_ids, MIN_ENTRIES),
    )
