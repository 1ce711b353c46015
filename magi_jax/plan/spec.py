"""Static sizes of a plan: everything that a compiled program may depend on.

A spec has *identities*, which two plans must share to be served by one program (ranks, sequence
length, tile size), and *capacities*, which may only be large enough. Capacities are rounded up to
buckets, so that masks of similar size share a spec and a program is compiled once for them.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

# Smallest capacities: shapes stay away from zero, and small masks share one bucket.
MIN_ENTRIES = 16  # slices, runs, ids and pieces of a table
MIN_PAIR_ROWS = 8  # rows of one pair of ranks, sent even where there is nothing to send
MIN_BUFFER_ROWS = 128  # rows of a received buffer: one tile
MIN_SEGMENTS = 4  # segments of a rank


# Where the keys of a plan are: with its queries, in another plan's dispatch, or whole on every rank.
OWN_KEYS, OTHER_KEYS, REPLICATED_KEYS = "own", "other", "replicated"


def bucket(size: int, minimum: int = 1) -> int:
    """Rounds ``max(size, minimum)`` up to 1, 1.25, 1.5 or 1.75 times a power of two."""
    size = max(int(size), minimum)
    if size <= 4:
        return size
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


def _capacity(minimum: int | None = 0) -> dict[str, int | None]:
    """Marks a field that need only be large enough, rounded up to buckets unless ``minimum`` is None."""
    return {"capacity": minimum}


@dataclass(frozen=True)
class _Sizes:
    """Comparison of specs, field by field; fields made by `_capacity` need only be large enough."""

    def shortfall(self, other, path: str = "spec") -> str | None:
        """Says where this spec is too small for ``other`` or of another kind; None when it covers
        it.
        """
        return _shortfall(self, other, path, capacity=False)

    def rounded(self):
        """The same with every capacity rounded up to its bucket."""
        return _rounded(self, None)

    def covers(self, other) -> bool:
        """Whether tables that need ``other`` fit into this spec."""
        return self.shortfall(other) is None

    def union(self, other):
        """The smallest spec that covers both. Raises ValueError where an identity differs."""
        return _union(self, other, "spec", capacity=False)


def _rounded(sizes: Any, minimum: int | None, factor: float = 1.0) -> Any:
    if sizes is None:
        return None
    if isinstance(sizes, tuple):
        return tuple(_rounded(entry, minimum, factor) for entry in sizes)
    if isinstance(sizes, _Sizes):
        fields = dataclasses.fields(sizes)
        values = (
            _rounded(getattr(sizes, f.name), f.metadata.get("capacity"), factor) for f in fields
        )
        return dataclasses.replace(
            sizes, **{f.name: value for f, value in zip(fields, values, strict=True)}
        )
    return sizes if minimum is None else bucket(math.ceil(sizes * factor), minimum)


def _is_list_of_parts(mine: Any, other: Any) -> bool:
    """Whether both are tuples of sizes, of which one may be longer, and not of plain numbers."""
    return isinstance(mine, tuple) and all(isinstance(part, _Sizes) for part in mine + other)


def _shortfall(mine: Any, other: Any, path: str, capacity: bool) -> str | None:
    if other is None:  # an absent part needs nothing
        return None
    if mine is None:
        return f"{path} is None, but one is needed"
    if _is_list_of_parts(mine, other):
        if len(mine) < len(other):  # entries beyond may stay empty
            return f"{path} has {len(mine)} entries, but {len(other)} are needed"
        pairs = enumerate(zip(mine, other, strict=False))
        steps = ((f"{path}[{i}]", a, b, capacity) for i, (a, b) in pairs)
    elif isinstance(mine, _Sizes):
        steps = (
            (
                f"{path}.{f.name}",
                getattr(mine, f.name),
                getattr(other, f.name),
                "capacity" in f.metadata,
            )
            for f in dataclasses.fields(mine)
        )
    elif capacity:
        return None if mine >= other else f"{path} is {mine}, but {other} is needed"
    else:
        return None if mine == other else f"{path} is {mine}, but must be {other}"
    return next(filter(None, (_shortfall(a, b, name, c) for name, a, b, c in steps)), None)


def _union(mine: Any, other: Any, path: str, capacity: bool) -> Any:
    if mine is None or other is None:
        return other if mine is None else mine
    if _is_list_of_parts(mine, other):
        pairs = enumerate(zip(mine, other, strict=False))
        both = tuple(_union(a, b, f"{path}[{i}]", capacity) for i, (a, b) in pairs)
        return both + mine[len(both) :] + other[len(both) :]
    if isinstance(mine, _Sizes):
        merged = {
            f.name: _union(
                getattr(mine, f.name),
                getattr(other, f.name),
                f"{path}.{f.name}",
                "capacity" in f.metadata,
            )
            for f in dataclasses.fields(mine)
        }
        return dataclasses.replace(mine, **merged)
    if not capacity and mine != other:
        raise ValueError(f"no spec covers both: {path} is {mine} in one and {other} in the other")
    return max(mine, other)


@dataclass(frozen=True)
class TableSpec(_Sizes):
    """Sizes of one `SliceTable`.

    Attributes:
        q_len, k_len: rows of the query and key buffers that the table speaks of.
        tile_size: rows of a tile.
        slices: capacity ``A``.
        query_runs, query_ids: capacities ``R`` and ``I`` of ``by_query``.
        key_runs, key_ids: the same of ``by_key``.
    """

    q_len: int = dataclasses.field(metadata=_capacity(None))
    k_len: int = dataclasses.field(metadata=_capacity(None))
    tile_size: int
    slices: int = dataclasses.field(metadata=_capacity(MIN_ENTRIES))
    query_runs: int = dataclasses.field(metadata=_capacity(MIN_ENTRIES))
    query_ids: int = dataclasses.field(metadata=_capacity(MIN_ENTRIES))
    key_runs: int = dataclasses.field(metadata=_capacity(MIN_ENTRIES))
    key_ids: int = dataclasses.field(metadata=_capacity(MIN_ENTRIES))


@dataclass(frozen=True)
class CommSpec(_Sizes):
    """Sizes of one `CommMeta`.

    Attributes:
        cp_size: number of ranks.
        src_rows: rows of the local input.
        dst_rows: rows of the buffer that is written.
        pair_rows: rows of the block of each ordered pair of different ranks.
        self_rows: most rows that a rank copies to itself; 0 when no row stays (every remote stage).
        pieces: capacity ``L`` of ``send`` and ``recv``.
    """

    cp_size: int
    src_rows: int
    dst_rows: int = dataclasses.field(metadata=_capacity(None))
    pair_rows: int = dataclasses.field(metadata=_capacity(MIN_PAIR_ROWS))
    self_rows: int = dataclasses.field(metadata=_capacity())
    pieces: int = dataclasses.field(metadata=_capacity(MIN_ENTRIES))


@dataclass(frozen=True)
class LateSpec(_Sizes):
    """Sizes of a `LateTables`: the slice table, and the cast that fills the buffer of its keys.

    Attributes:
        calc, comm: as there.
        shared_rows: capacity ``E`` of its `SharedTables`; None where it has none.
    """

    calc: TableSpec
    comm: CommSpec
    shared_rows: int | None = dataclasses.field(default=None, metadata=_capacity(MIN_BUFFER_ROWS))

    @property
    def shared_comm(self) -> CommSpec:
        """Sizes of the transfer of the `SharedTables`."""
        assert self.shared_rows is not None, "there are no shared keys"
        return dataclasses.replace(self.comm, src_rows=self.shared_rows)


@dataclass(frozen=True)
class StagesSpec(_Sizes):
    """Sizes of the stages of one direction: ``calc``, ``comm`` and ``late`` as in `PlanSpec`."""

    calc: tuple[TableSpec, ...]
    comm: tuple[CommSpec, ...]
    late: LateSpec | None = None


@dataclass(frozen=True)
class TravelSpec(_Sizes):
    """Sizes of a `TravelTables`: the slice table, and the cast of query rows that feeds it."""

    calc: TableSpec
    comm: CommSpec


@dataclass(frozen=True)
class PlanSpec(_Sizes):
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
        comm: sizes of the cast that feeds stage ``i + 1``.
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
    segments: int = dataclasses.field(metadata=_capacity(MIN_SEGMENTS))
    calc: tuple[TableSpec, ...]
    comm: tuple[CommSpec, ...]
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

    def shortfall(self, other: "PlanSpec", path: str = "spec") -> str | None:
        """Says where this spec is too small for ``other`` or of another kind; None when it covers
        it. Stages that only this spec has stay empty.
        """
        if self.backward is not None:
            other = dataclasses.replace(other, backward=other.backward_stages)
        return super().shortfall(other, path)

    def union(self, other: "PlanSpec") -> "PlanSpec":
        """The smallest spec that covers both, with the larger number of stages of each direction.

        Raises:
            ValueError: an identity differs; it is named.
        """
        if (self.backward is None) != (other.backward is None):
            both = (dataclasses.replace(s, backward=s.backward_stages) for s in (self, other))
            mine, other = both
            return _union(mine, other, "spec", capacity=False)
        return _union(self, other, "spec", capacity=False)

    def scaled(self, factor: float) -> "PlanSpec":
        """The same with capacities ``factor`` times as large: room for masks not seen yet.

        Buffers whose size follows from the dispatch keep it, no rank gets room for more rows than others
        hold and no pair for more than one of them holds, and segments and pieces are enough for whole
        chunks in any order.
        """
        num_chunks = -(-self.seq_len // self.chunk_size)
        chunks = -(-num_chunks // self.cp_size)  # of a rank, at most

        def grown(spec: CommSpec) -> CommSpec:
            wide = _rounded(spec, None, factor)
            pair_rows = max(min(wide.pair_rows, spec.src_rows), spec.pair_rows)
            arriving = bucket(math.ceil(spec.dst_rows * factor), MIN_BUFFER_ROWS)
            others = bucket((spec.cp_size - 1) * spec.src_rows, MIN_BUFFER_ROWS)
            return dataclasses.replace(
                wide,
                dst_rows=max(min(arriving, others), spec.dst_rows),
                pair_rows=pair_rows,
                self_rows=spec.self_rows,
            )

        def moved(spec: CommSpec) -> CommSpec:
            self_rows = min(bucket(math.ceil(spec.self_rows * factor)), spec.src_rows)
            self_rows = max(self_rows, spec.self_rows)
            # A chunk meets at most two ranks of the contiguous layout, and three chunks when rolled.
            pieces = bucket(max(3 * chunks, math.ceil(spec.pieces * factor)), MIN_ENTRIES)
            return dataclasses.replace(
                grown(spec), dst_rows=spec.dst_rows, self_rows=self_rows, pieces=pieces
            )

        def staged(stages: StagesSpec) -> StagesSpec:
            comm = tuple(map(grown, stages.comm))
            k_lens = (stages.calc[0].k_len, *(spec.dst_rows for spec in comm))
            tables = (_rounded(table, None, factor) for table in stages.calc)
            calc = (
                dataclasses.replace(t, q_len=self.local_len, k_len=n)
                for t, n in zip(tables, k_lens, strict=True)
            )
            late = None if stages.late is None else waited(stages.late)
            return StagesSpec(tuple(calc), comm, late)

        def waited(late: LateSpec) -> LateSpec:
            comm = grown(late.comm)
            self_rows = min(bucket(math.ceil(late.comm.self_rows * factor)), comm.src_rows)
            arriving = bucket(math.ceil(late.comm.dst_rows * factor), MIN_BUFFER_ROWS)
            most = bucket(comm.cp_size * comm.src_rows, MIN_BUFFER_ROWS)  # own ones too
            comm = dataclasses.replace(
                comm,
                dst_rows=max(min(arriving, most), late.comm.dst_rows),
                self_rows=max(self_rows, late.comm.self_rows),
            )
            calc = _rounded(late.calc, None, factor)
            q_len = bucket(math.ceil(late.calc.q_len * factor), MIN_BUFFER_ROWS)
            calc = dataclasses.replace(calc, q_len=q_len, k_len=comm.dst_rows)
            rows = late.shared_rows
            if rows is not None:
                rows = min(bucket(math.ceil(rows * factor), MIN_BUFFER_ROWS), comm.src_rows)
                rows = max(rows, late.shared_rows or 0)
            return LateSpec(calc, comm, rows)

        def travelled(travel: TravelSpec) -> TravelSpec:
            comm = grown(travel.comm)
            calc = _rounded(travel.calc, None, factor)
            calc = dataclasses.replace(calc, q_len=comm.dst_rows, k_len=self.local_len)
            return TravelSpec(calc, comm)

        forward = staged(self.forward_stages)
        return dataclasses.replace(
            self,
            segments=bucket(max(chunks, math.ceil(self.segments * factor)), MIN_SEGMENTS),
            calc=forward.calc,
            comm=forward.comm,
            late=forward.late,
            backward=None if self.backward is None else staged(self.backward),
            travel=None if self.travel is None else travelled(self.travel),
            transfer=moved(self.transfer),
            rolls=tuple(map(moved, self.rolls)),
        )
