"""Lays out the work of one direction: its stages, with or without late queries."""

import numpy as np

from magi_jax.plan.comm_spec import CommSpec
from magi_jax.plan.frame import Frame, does_not_fit
from magi_jax.plan.lay_out.late import empty_late, late_tables
from magi_jax.plan.part_specs import StagesSpec, TableSpec
from magi_jax.plan.slice_table import build_table, empty_table
from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.tables import SliceTable, StageTables
from magi_jax.plan.two_level import empty_transfer, lay_out_transfer
from magi_jax.solver.overlap.late import LateWork, find_late_gradients
from magi_jax.solver.overlap.own_first import split_first
from magi_jax.solver.work import transfer
from magi_jax.solver.work.find_work import Work
from magi_jax.solver.work.stages import Staged, StageSlices


def lay_out_stages(
    staged: Staged,
    work: Work,
    frame: Frame,
    spec: StagesSpec | None,
    path: str = "spec",
    local: SliceTable | None = None,
    per_node: int | None = None,
    first: StageSlices | None = None,
) -> StageTables:
    """Tables of the stages of one direction; stages that only the spec has stay empty. ``local`` is that
    of stage 0, if it is there already. ``per_node`` are the ranks of a node where transfers take two
    steps and no spec settles that. ``first`` is what comes before them; a spec settles whether anything does.
    """
    if spec is not None and spec.first is not None:
        first, staged = split_first(staged, frame.local_len, frame.tile_size)
    count = staged.num_remote_stages
    comm = [
        lay_out_transfer(
            transfer.stage_pieces(staged.remote, stage),
            CommSpec(frame.cp_size, work.keys.local_len, 0, 0, 0, 0),
            None if spec is None else spec.comm[stage],
            f"{path}.comm[{stage}]",
            work.engine,
            per_node,
            is_near=bool(staged.near) and staged.near[stage],
        )
        for stage in range(count)
    ]
    buffers = (work.keys.local_len, *(meta.dst_rows for meta in comm))
    calc = [
        local
        if i == 0 and local is not None
        else stage_table(
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
    late = None if spec is None or spec.late is None else empty_late(spec.late)
    ahead = None
    if first is not None:
        wanted, lengths = None if spec is None else spec.first, (frame.local_len, buffers[0])
        ahead = stage_table(first, frame, lengths, wanted, f"{path}.first", work.engine)
    return StageTables(tuple(calc), tuple(comm), late, ahead)


def lay_out_late(
    late: LateWork, work: Work, frame: Frame, spec: StagesSpec | None, path: str = "spec"
) -> StageTables:
    """Tables of one direction with late queries; remote stages that only the spec has stay empty."""
    if spec is not None and spec.late is None:
        raise does_not_fit(f"{path}.late is None, but queries are late")
    home = lay_out_stages(late.home, work, frame, spec, path)
    wanted = None if spec is None else spec.late
    tables = late_tables(late, work.keys, frame, wanted, f"{path}.late", work.engine)
    return StageTables(home.calc, home.comm, tables, home.first)


def lay_out_both_late(
    late: LateWork, work: Work, frame: Frame, spec: PlanSpec | None
) -> tuple[StageTables, StageTables | None]:
    """Both directions with late queries."""
    gradients = find_late_gradients(work, late, frame.tile_size, frame.local_len)
    if spec is None:
        return lay_out_late(late, work, frame, None), lay_out_late(gradients, work, frame, None)
    if spec.backward is None:
        raise does_not_fit("spec.backward is None, but queries are late")
    forward = lay_out_late(late, work, frame, spec.forward_stages)
    return forward, lay_out_late(gradients, work, frame, spec.backward, "spec.backward")


def stage_table(
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
