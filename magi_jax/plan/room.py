"""Room for masks not seen yet: sizes of the parts of a plan with space for more rows and more entries."""

import dataclasses
import math

from magi_jax.plan.comm_spec import AnyCommSpec, CommSpec, TwoLevelSpec, grown
from magi_jax.plan.part_specs import LateSpec, StagesSpec, TableSpec, TravelSpec
from magi_jax.plan.sizes import MIN_BUFFER_ROWS, MIN_ENTRIES, bucket


def roomy_stages(stages: StagesSpec, factor: float, local_len: int) -> StagesSpec:
    """Stages of a direction with room for ``factor`` times as many rows.

    Args:
        stages: their sizes.
        factor: at least 1.
        local_len: rows of each rank.
    """
    comm = _with_equal_self_rows(tuple(grown(spec, factor) for spec in stages.comm))

    def roomy(table: TableSpec, k_len: int) -> TableSpec:
        return dataclasses.replace(table.scaled(factor), q_len=local_len, k_len=k_len)

    own_keys = stages.calc[0].k_len
    k_lens = (own_keys, *(spec.dst_rows for spec in comm))
    calc = (roomy(table, k_len) for table, k_len in zip(stages.calc, k_lens, strict=True))
    first = None if stages.first is None else roomy(stages.first, own_keys)
    late = None if stages.late is None else roomy_late(stages.late, factor, local_len)
    return StagesSpec(tuple(calc), comm, late, first)


def roomy_late(late: LateSpec, factor: float, local_len: int) -> LateSpec:
    """The same of late queries; no rank gets room for more keys than there are."""
    comm = grown(late.comm, factor)
    self_rows = min(bucket(math.ceil(late.comm.self_rows * factor)), comm.src_rows)
    arriving = bucket(math.ceil(late.comm.dst_rows * factor), MIN_BUFFER_ROWS)
    most = bucket(comm.cp_size * comm.src_rows, MIN_BUFFER_ROWS)  # own ones too
    comm = dataclasses.replace(
        comm,
        dst_rows=max(min(arriving, most), late.comm.dst_rows),
        self_rows=max(self_rows, late.comm.self_rows),
    )
    calc = late.calc.scaled(factor)
    calc = dataclasses.replace(calc, q_len=local_len, k_len=comm.dst_rows)
    rows = late.shared_rows
    if rows is not None:
        roomy = min(bucket(math.ceil(rows * factor), MIN_BUFFER_ROWS), comm.src_rows)
        rows = max(roomy, rows)
    return LateSpec(calc, comm, rows)


def roomy_travel(travel: TravelSpec, factor: float) -> TravelSpec:
    """The same of travelling queries."""
    comm = grown(travel.comm, factor)
    calc = travel.calc.scaled(factor)
    return TravelSpec(dataclasses.replace(calc, q_len=comm.dst_rows), comm)


def roomy_move(spec: CommSpec, factor: float, pieces: int) -> CommSpec:
    """A transfer of tokens between layouts, whose buffer follows from the dispatch and stays.

    Args:
        spec: its sizes.
        factor: room for so many times as many rows between two ranks.
        pieces: of a rank, at least.
    """
    return dataclasses.replace(
        grown(spec, factor),
        dst_rows=spec.dst_rows,
        # Whether tokens stay where they are differs most of all, from none to all of a rank's.
        self_rows=max(spec.self_rows, spec.src_rows),
        pieces=bucket(pieces, MIN_ENTRIES),
    )


def _with_equal_self_rows(comm: tuple[AnyCommSpec, ...]) -> tuple[AnyCommSpec, ...]:
    """Stages in two steps, each with room for as many rows that stay on their rank as any has: none stay in
    a stage of rows of other nodes, which in the next batch may be one of all.
    """
    steps = [(c.first.self_rows, c.second.self_rows) for c in comm if isinstance(c, TwoLevelSpec)]
    if not steps:
        return comm
    most = [max(rows) for rows in zip(*steps, strict=True)]
    return tuple(
        dataclasses.replace(
            spec,
            first=dataclasses.replace(spec.first, self_rows=most[0]),
            second=dataclasses.replace(spec.second, self_rows=most[1]),
        )
        if isinstance(spec, TwoLevelSpec)
        else spec
        for spec in comm
    )
