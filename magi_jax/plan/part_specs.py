"""Sizes of the parts of a plan: a slice table, the stages of a direction, late and travelling queries."""

import dataclasses
from dataclasses import dataclass

from magi_jax.plan.comm_spec import AnyCommSpec, CommSpec
from magi_jax.plan.sizes import (
    MIN_BUFFER_ROWS,
    MIN_ENTRIES,
    Sizes,
    bucket,
    capacity,
    entries_factor,
    require_growth,
    rounded,
)


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

    def scaled(self, factor: float) -> "TableSpec":
        """The same with room for the entries that go with ``factor`` times as many rows of keys
        (`sizes.entries_factor`): for masks not seen yet.

        Raises:
            ValueError: ``factor`` is less than 1, which would leave no room for the table itself.
        """
        require_growth(factor)
        wide = rounded(self, None, entries_factor(factor))
        # Ids take 4 bytes, and there is one for each slice and tile that meet: no number differs more.
        twice = 2 if factor > 1 else 1
        return dataclasses.replace(
            wide,
            query_ids=bucket(twice * wide.query_ids, MIN_ENTRIES),
            key_ids=bucket(twice * wide.key_ids, MIN_ENTRIES),
        )


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
    """Sizes of the stages of one direction: ``calc``, ``comm`` and ``late`` as in `PlanSpec`, ``first`` as in
    `StageTables`.
    """

    calc: tuple[TableSpec, ...]
    comm: tuple[AnyCommSpec, ...]
    late: LateSpec | None = None
    first: TableSpec | None = None

    @property
    def near(self) -> tuple[bool, ...]:
        """Whether each remote stage has rows of own nodes alone."""
        return tuple(spec.is_near for spec in self.comm)


@dataclass(frozen=True)
class TravelSpec(Sizes):
    """Sizes of a `TravelTables`: the slice table, and the cast of query rows that feeds it."""

    calc: TableSpec
    comm: AnyCommSpec
