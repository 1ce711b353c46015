"""Lays out what crosses ranks and what each rank computes: stages of both directions, and travel."""

from typing import NamedTuple

import numpy as np

from magi_jax.plan.comm_spec import CommSpec
from magi_jax.plan.frame import Frame, does_not_fit
from magi_jax.plan.lay_out_late import empty_late, late_tables
from magi_jax.plan.slice_table import build_table, empty_table, exact_spec
from magi_jax.plan.spec import LateSpec, PlanSpec, StagesSpec, TableSpec, TravelSpec
from magi_jax.plan.tables import LateTables, SliceTable, StageTables, TravelTables
from magi_jax.plan.two_level import empty_transfer, lay_out_transfer
from magi_jax.solver import transfer
from magi_jax.solver.late import (
    MOST_LATE,
    LateWork,
    find_late,
    find_late_gradients,
    late_rows,
    predict_us,
)
from magi_jax.solver.overlap import Counts, Machine, choose_stages
from magi_jax.solver.stages import Staged, StageSlices
from magi_jax.solver.work import Travel, Work

# "auto", "late", or the number of remote stages: one for both directions, or (forward, backward).
Overlap = int | str | tuple[int, int]
AUTO, LATE = "auto", "late"


class WorkTables(NamedTuple):
    """Tables of the work of a plan; ``backward`` is None when it shares those of ``forward``."""

    forward: StageTables
    backward: StageTables | None
    travel: TravelTables | None


def lay_out_work(
    work: Work,
    frame: Frame,
    overlap: Overlap,
    spec: PlanSpec | None,
    machine: Machine,
) -> WorkTables:
    """Chooses stages and lays everything out.

    Args:
        work: what the layout asks for.
        frame: identities.
        overlap: number of remote stages, or queries that are late instead of them.
        spec: sizes to lay out in; settles what ``overlap`` leaves open.
        machine: what to predict times for.

    Raises:
        ValueError: the work does not fit ``spec``.
    """
    counts = _counts(overlap, work)
    if overlap == LATE:
        if work.travel is not None:
            raise ValueError(
                'overlap="late" wants travelling="never": a query does one or the other'
            )
        late = _find_late(work, frame, 1.0)
        if late is not None:
            travel = _lay_out_travel(work, frame, spec, None)
            return WorkTables(*_late_in(late, work, frame, spec), travel)
    if spec is not None:
        travel = _lay_out_travel(work, frame, spec, None)
        return WorkTables(*_lay_out_in(work, frame, overlap, spec, machine), travel)
    choice = choose_stages(work, frame.local_len, machine, counts)
    if overlap == AUTO:
        late = _find_late(work, frame, MOST_LATE, choice.forward)
        if late is not None and predict_us(late, machine) < choice.predicted_us:
            return WorkTables(*_late_in(late, work, frame, None), None)
    per_node = machine.node_of(frame.cp_size) if choice.two_level else None
    travel = _lay_out_travel(work, frame, None, per_node)
    forward = _lay_out_stages(choice.forward, work, frame, None, per_node=per_node)
    if choice.backward is choice.forward:
        return WorkTables(forward, None, travel)
    # The local stage is the same however many others there are.
    backward = _lay_out_stages(
        choice.backward, work, frame, None, local=forward.calc[0], per_node=per_node
    )
    return WorkTables(forward, backward, travel)


def _find_late(
    work: Work, frame: Frame, most: float, staged: Staged | None = None
) -> LateWork | None:
    """The work with late queries, where there may be any and they are at most a share ``most`` of the rows
    of a rank; ``staged`` are any stages of the work, where they are known.
    """
    if work.layout.cp_size == 1 or work.keys.layout is None:
        return None
    if work.travel is not None:
        return None
    staged = work.staged(1) if staged is None else staged
    rows = late_rows(staged, frame.cp_size, frame.tile_size, frame.local_len)
    if rows.held.max() > most * frame.local_len:
        return None
    return find_late(work, rows, frame.local_len)


def _counts(overlap: Overlap, work: Work) -> Counts:
    """Settled numbers of remote stages, forward and backward; 0 where nothing is remote."""
    if work.layout.cp_size == 1 or work.keys.layout is None:
        return 0, 0
    if isinstance(overlap, str):
        return None, None
    return overlap if isinstance(overlap, tuple) else (overlap, overlap)


def _lay_out_in(
    work: Work, frame: Frame, overlap: Overlap, spec: PlanSpec, machine: Machine
) -> tuple[StageTables, StageTables | None]:
    """Both directions in given sizes: with late queries or in stages, what is predicted faster and fits."""
    counts = _counts(overlap, work)
    late = None
    if overlap == AUTO and spec.late is not None:
        late = _find_late(work, frame, 1.0)
    if late is None:
        return _stages_in(work, frame, counts, spec, machine)
    if not spec.comm:
        return _late_in(late, work, frame, spec)
    ways = [
        lambda: _late_in(late, work, frame, spec),
        lambda: _stages_in(work, frame, counts, spec, machine),
    ]
    staged_us = choose_stages(work, frame.local_len, machine, counts).predicted_us
    if predict_us(late, machine) > staged_us:
        ways.reverse()
    try:
        return ways[0]()
    except ValueError:
        return ways[1]()


def _late_in(
    late: LateWork, work: Work, frame: Frame, spec: PlanSpec | None
) -> tuple[StageTables, StageTables | None]:
    """Both directions with late queries."""
    gradients = find_late_gradients(work, late, frame.tile_size, frame.local_len)
    if spec is None:
        return _lay_out_late(late, work, frame, None), _lay_out_late(gradients, work, frame, None)
    if spec.backward is None:
        raise does_not_fit("spec.backward is None, but queries are late")
    forward = _lay_out_late(late, work, frame, spec.forward_stages)
    return forward, _lay_out_late(gradients, work, frame, spec.backward, "spec.backward")


def _stages_in(
    work: Work, frame: Frame, counts: Counts, spec: PlanSpec, machine: Machine
) -> tuple[StageTables, StageTables | None]:
    """As many stages as there are, or fewer where those do not fit."""
    forward, backward = counts
    if spec.backward is None and forward != backward:
        raise ValueError(
            f"overlap={counts} wants stages of their own for the backward pass, the spec has none"
        )
    first = _fit_stages(work, frame, forward, spec.forward_stages, "spec", machine)
    if spec.backward is None:
        return first, None
    return first, _fit_stages(work, frame, backward, spec.backward, "spec.backward", machine)


def _fit_stages(
    work: Work, frame: Frame, count: int | None, spec: StagesSpec, path: str, machine: Machine
) -> StageTables:
    most = len(spec.comm)
    if count is not None and count > most:
        raise ValueError(
            f"overlap={count} is the number of remote stages, the spec has {most} of them"
        )
    first_problem = None
    for number in range(most, 0, -1) if count is None else (count,):
        choice = choose_stages(work, frame.local_len, machine, (number, number))
        staged = choice.forward if path == "spec" else choice.backward
        try:
            return _lay_out_stages(staged, work, frame, spec, path)
        except ValueError as problem:
            first_problem = first_problem or problem
    raise first_problem or AssertionError("a spec has at least one remote stage")


def _lay_out_stages(
    staged: Staged,
    work: Work,
    frame: Frame,
    spec: StagesSpec | None,
    path: str = "spec",
    local: SliceTable | None = None,
    per_node: int | None = None,
) -> StageTables:
    """Tables of the stages of one direction; stages that only the spec has stay empty. ``local`` is that
    of stage 0, if it is there already. ``per_node`` are the ranks of a node where transfers take two
    steps and no spec settles that.
    """
    count = staged.num_remote_stages
    comm = [
        lay_out_transfer(
            transfer.stage_pieces(staged.remote, stage),
            CommSpec(frame.cp_size, work.keys.local_len, 0, 0, 0, 0),
            None if spec is None else spec.comm[stage],
            f"{path}.comm[{stage}]",
            work.engine,
            per_node,
        )
        for stage in range(count)
    ]
    buffers = (work.keys.local_len, *(meta.dst_rows for meta in comm))
    calc = [
        local
        if i == 0 and local is not None
        else _table(
            stage,
            frame,
            (frame.local_len, buffers[i]),
            None if spec is None else spec.calc[i],
            f"{path}.calc[{i}]",
            work.engine,
        )
        for i, stage in enumerate(staged.slices)
    ]
    if spec is not None:
        comm += map(empty_transfer, spec.comm[count:])
        calc += (empty_table(sizes, frame.cp_size) for sizes in spec.calc[count + 1 :])
    late = None if spec is None or spec.late is None else empty_late(spec.late, frame.local_len)
    return StageTables(tuple(calc), tuple(comm), late)


def _lay_out_late(
    late: LateWork, work: Work, frame: Frame, spec: StagesSpec | None, path: str = "spec"
) -> StageTables:
    """Tables of one direction with late queries; remote stages that only the spec has stay empty."""
    if spec is not None and spec.late is None:
        raise does_not_fit(f"{path}.late is None, but queries are late")
    home = _lay_out_stages(late.home, work, frame, spec, path)
    wanted = None if spec is None else spec.late
    tables = late_tables(late, work.keys, frame, wanted, f"{path}.late", work.engine)
    return StageTables(home.calc, home.comm, tables)


def _lay_out_travel(
    work: Work, frame: Frame, spec: PlanSpec | None, ranks_per_node: int | None
) -> TravelTables | None:
    wanted = None if spec is None else spec.travel
    if work.travel is None:
        return None if wanted is None else empty_travel(wanted)
    if spec is not None and wanted is None:
        raise does_not_fit("spec.travel is None, but queries travel")
    return _travel_tables(work.travel, work, frame, wanted, ranks_per_node)


def _travel_tables(
    travel: Travel,
    work: Work,
    frame: Frame,
    wanted: TravelSpec | None,
    ranks_per_node: int | None,
) -> TravelTables:
    comm = lay_out_transfer(
        transfer.stage_pieces(travel.moved, 0),
        CommSpec(frame.cp_size, frame.local_len, 0, 0, 0, 0),
        None if wanted is None else wanted.comm,
        "spec.travel.comm",
        work.engine,
        ranks_per_node,
    )
    calc = _table(
        travel.away,
        frame,
        (comm.dst_rows, work.keys.local_len),
        None if wanted is None else wanted.calc,
        "spec.travel.calc",
        work.engine,
    )
    return TravelTables(comm, calc)


def empty_travel(spec: TravelSpec) -> TravelTables:
    """Tables of a plan of which no query travels."""
    return TravelTables(empty_transfer(spec.comm), empty_table(spec.calc, spec.comm.cp_size))


def _table(
    work: StageSlices,
    frame: Frame,
    lengths: tuple[int, int],
    wanted: TableSpec | None,
    path: str,
    engine: str,
) -> SliceTable:
    """The slice table of one stage, for query and key buffers of ``lengths`` rows."""
    return build_table(
        work.slices, np.asarray(work.rank, np.int64), frame.cp_size, *lengths, frame.tile_size,
        engine, wanted, path,
    )  # fmt: skip


def spec_of(tables: WorkTables) -> dict:
    """The fields of a `PlanSpec` that finished tables settle."""

    def stages(part: StageTables) -> StagesSpec:
        comm = tuple(m.spec for m in part.comm)
        last = None if part.late is None else late(part.late)
        return StagesSpec(tuple(map(exact_spec, part.calc)), comm, last)

    def late(part: LateTables) -> LateSpec:
        shared_rows = None if part.shared is None else part.shared.comm.src_rows
        return LateSpec(exact_spec(part.calc), part.comm.spec, shared_rows)

    def travel(part: TravelTables) -> TravelSpec:
        return TravelSpec(exact_spec(part.calc), part.comm.spec)

    forward = stages(tables.forward)
    return {
        "calc": forward.calc,
        "comm": forward.comm,
        "late": forward.late,
        "backward": None if tables.backward is None else stages(tables.backward),
        "travel": None if tables.travel is None else travel(tables.travel),
    }
