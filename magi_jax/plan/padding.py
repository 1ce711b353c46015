"""Brings finished tables to larger sizes: what `AttentionPlan.pad_to` does."""

import numpy as np

from magi_jax.plan.comm_spec import AnyCommSpec, CommSpec
from magi_jax.plan.frame import does_not_fit
from magi_jax.plan.lay_out.late import empty_late, no_rows
from magi_jax.plan.lay_out.transfer import padding_piece
from magi_jax.plan.lay_out.travel import empty_travel
from magi_jax.plan.lay_out.work import WorkTables
from magi_jax.plan.part_specs import LateSpec, StagesSpec, TableSpec
from magi_jax.plan.slice_table import empty_table, pad_entries
from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.tables import (
    N_ROWS,
    AnyComm,
    CommMeta,
    DispatchMeta,
    LateTables,
    SharedTables,
    SliceTable,
    StageTables,
    TravelTables,
    TwoLevelComm,
)
from magi_jax.plan.two_level import empty_transfer, in_two_steps
from magi_jax.solver.slice_table import FULL_BEGIN, FULL_END, RUN_BEGIN, TileRuns


def pad_plan_tables(
    spec: PlanSpec,
    wanted: PlanSpec,
    dispatched: DispatchMeta,
    rolls: tuple[CommMeta, ...],
    tables: WorkTables,
) -> tuple[DispatchMeta, tuple[CommMeta, ...], WorkTables]:
    """All tables of a plan of ``spec`` in the sizes of ``wanted``, which covers it."""
    if problem := wanted.shortfall(spec):
        raise does_not_fit(problem)
    segments = pad_entries(np.asarray(dispatched.segments), wanted.segments)
    transfer = _pad_comm(dispatched.transfer, wanted.transfer)
    backward = tables.backward
    if wanted.backward is not None:
        backward = _pad_stages(backward or tables.forward, wanted.backward, wanted.local_len)
    travel = tables.travel
    if travel is not None and wanted.travel is not None:
        calc = _pad_table(travel.calc, wanted.travel.calc)
        travel = TravelTables(_pad_transfer(travel.comm, wanted.travel.comm), calc)
    elif wanted.travel is not None:
        travel = empty_travel(wanted.travel)
    return (
        DispatchMeta(segments, np.asarray(dispatched.positions), transfer),
        tuple(_pad_comm(meta, size) for meta, size in zip(rolls, wanted.rolls, strict=True)),
        WorkTables(
            _pad_stages(tables.forward, wanted.forward_stages, wanted.local_len), backward, travel
        ),
    )


def _pad_stages(stages: StageTables, wanted: StagesSpec, local_len: int) -> StageTables:
    comm = [_pad_transfer(m, size) for m, size in zip(stages.comm, wanted.comm, strict=False)]
    calc = [_pad_table(t, size) for t, size in zip(stages.calc, wanted.calc, strict=False)]
    cp_size = len(calc[0].slices)
    comm += map(empty_transfer, wanted.comm[len(comm) :])
    calc += (empty_table(size, cp_size) for size in wanted.calc[len(calc) :])
    late = None
    if wanted.late is not None:
        if stages.late is None:
            late = empty_late(wanted.late)
        else:
            late = _pad_late(stages.late, wanted.late)
    first = None
    if wanted.first is not None:
        if stages.first is None:
            first = empty_table(wanted.first, cp_size)
        else:
            first = _pad_table(stages.first, wanted.first)
    return StageTables(tuple(calc), tuple(comm), late, first)


def _pad_late(late: LateTables, wanted: LateSpec) -> LateTables:
    comm, calc = _pad_comm(late.comm, wanted.comm), _pad_table(late.calc, wanted.calc)
    assert (late.shared is None) == (wanted.shared_rows is None), "one direction is another's"
    if late.shared is None or wanted.shared_rows is None:
        return LateTables(comm, calc)
    keys = no_rows(len(late.shared.rows), wanted.shared_rows, wanted.comm.src_rows)
    keys[:, : late.shared.rows.shape[1]] = late.shared.rows
    shared = SharedTables(keys, _pad_comm(late.shared.comm, wanted.shared_comm))
    return LateTables(comm, calc, shared)


def _pad_transfer(comm: AnyComm, wanted: AnyCommSpec) -> AnyComm:
    if isinstance(wanted, CommSpec):
        assert isinstance(comm, CommMeta), "a spec of one step covers no transfer in two"
        return _pad_comm(comm, wanted)
    if isinstance(comm, CommMeta):
        return in_two_steps(comm, wanted.ranks_per_node, wanted)
    across, within = (_pad_comm(*step) for step in zip(comm.steps, wanted.steps, strict=True))
    return TwoLevelComm(across, within, wanted.ranks_per_node)


def _pad_comm(meta: CommMeta, wanted: CommSpec) -> CommMeta:
    def pad(table):
        out = pad_entries(np.asarray(table), wanted.pieces)
        out[out[:, :, N_ROWS] == 0] = padding_piece(wanted)
        return out

    return CommMeta(pad(meta.send), pad(meta.recv), wanted)


def _pad_table(table: SliceTable, wanted: TableSpec) -> SliceTable:
    return SliceTable(
        pad_entries(np.asarray(table.slices), wanted.slices),
        _pad_runs(table.by_query, table.q_len, wanted.q_len, wanted),
        _pad_runs(table.by_key, table.k_len, wanted.k_len, wanted, by_key=True),
        wanted.q_len,
        wanted.k_len,
        wanted.tile_size,
    )


def _pad_runs(
    runs: TileRuns, length: int, wanted_length: int, wanted: TableSpec, by_key: bool = False
) -> TileRuns:
    """Runs of a longer axis: its tiles beyond have none, and a last tile that was short is no longer
    filled.
    """
    ptr, order, table = (np.asarray(x) for x in (runs.ptr, runs.order, runs.runs))
    tiles, size = order.shape[1], wanted.tile_size
    if wanted_length > length and length % size:
        table = table.copy()
        for part, (first, last) in enumerate(ptr[:, [tiles - 1, tiles]]):
            of_tile = table[part, first:last]
            of_tile[:, FULL_BEGIN] = of_tile[:, FULL_END] = of_tile[:, RUN_BEGIN]
    more = max(-(-wanted_length // size), 1) - tiles
    num_runs, num_ids = (
        (wanted.key_runs, wanted.key_ids) if by_key else (wanted.query_runs, wanted.query_ids)
    )
    beyond = np.broadcast_to(np.arange(tiles, tiles + more, dtype=np.int32), (len(ptr), more))
    return TileRuns(
        ptr=np.concatenate([ptr, np.repeat(ptr[:, -1:], more, axis=1)], axis=1),
        runs=pad_entries(table, num_runs),
        ids=pad_entries(np.asarray(runs.ids), num_ids),
        order=np.concatenate([order, beyond], axis=1),
    )
