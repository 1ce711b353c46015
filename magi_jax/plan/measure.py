"""Reads a plan's report off its tables."""

import math
from dataclasses import replace

import jax
import numpy as np

from magi_jax.masks import AttnMask, bands
from magi_jax.plan.report import PlanReport
from magi_jax.plan.spec import OWN_KEYS
from magi_jax.plan.tables import (
    N_ROWS,
    PEER,
    SEGMENT_ROWS,
    SRC_ROW,
    CommMeta,
    SliceTable,
    StageTables,
)
from magi_jax.solver import intervals, timeline
from magi_jax.solver.balanced_units import MAX_PARTS, make_units
from magi_jax.solver.bounds import Bounds, lower_bounds
from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.dispatch import DispatchProblem, chunk_edges
from magi_jax.solver.stages import StageSlices
from magi_jax.solver.travelling import NO_RANGES, Ranges, split_slices


def make_report(
    plan,
    cost_model: CostModel | None = None,
    ranks_per_node: int | None = None,
    mask: AttnMask | None = None,
) -> PlanReport:
    """Counts what a plan costs.

    Args:
        plan: one whole plan with values.
        cost_model: rates of the machine, for the predicted times; None takes the defaults.
        ranks_per_node: ranks that share a fast link; None takes all ranks for one node.
        mask: the mask that was planned, for the lower bounds.

    Raises:
        ValueError: the plan is traced, stacked or local, so that there are no tables to count; or
            bounds are asked for of cross-attention.
    """
    require_concrete(plan, "report")
    cp_size = plan.cp_size
    transfers = _transfers(plan.forward_stages)
    rows = _traffic(transfers, cp_size)
    travel = plan.travel
    moved = np.zeros((cp_size, cp_size), np.int64)
    if travel is not None:
        moved = _traffic([travel.comm], cp_size)[0]
    works = _works(plan, moved, cost_model or CostModel(), ranks_per_node or cp_size)
    received = int(rows.sum())
    report = PlanReport(
        seq_len=plan.spec.seq_len,
        local_len=plan.spec.local_len,
        tokens=np.asarray(plan.dispatch.segments, np.int64)[:, :, SEGMENT_ROWS].sum(axis=1),
        area=np.stack([_areas(table) for table in _tables(plan.forward_stages)]),
        traffic=rows,
        backward_stages=len(_transfers(plan.backward_stages)),
        travel_area=np.zeros(cp_size, np.int64) if travel is None else _areas(travel.calc),
        travel_traffic=moved,
        buffer_rows=np.array([meta.dst_rows for meta in transfers], np.int64),
        pair_rows=np.array([meta.pair_rows for meta in transfers], np.int64),
        redundancy=received / max(_distinct_rows(plan), 1) if received else 1.0,
        planning_ms=plan.planning_ms,
        forward=timeline.simulate(works[0]),
        backward=timeline.simulate(works[1]),
        forward_kernel_us=works[0].busy_us,
        backward_kernel_us=works[1].busy_us,
        is_cross=plan.spec.keys != OWN_KEYS,
    )
    if mask is None:
        return report
    if report.is_cross:
        raise ValueError(
            "lower bounds are of self-attention; the keys of this plan are other tokens"
        )
    return replace(report, bounds=_bounds(plan, mask, report.imbalance, ranks_per_node))


def _bounds(plan, mask: AttnMask, imbalance: float, ranks_per_node: int | None) -> Bounds:
    """Lower bounds for all dispatches that are no less balanced than the plan.

    The units are the smallest parts into which a strategy may split a chunk, so that the bounds hold
    for split and for whole chunks.
    """
    part = plan.spec.chunk_size // math.gcd(plan.spec.chunk_size, MAX_PARTS)
    edges = chunk_edges(plan.spec.seq_len, part)
    home, travelling = split_slices(mask.slices, _travelling_ranges(plan))
    problem = DispatchProblem(home, edges, plan.cp_size, travelling=travelling)
    units = make_units(problem)
    units = units._replace(slot=plan.spec.local_len, slots=1)
    return lower_bounds(units, plan.cp_size, ranks_per_node or plan.cp_size, imbalance)


def _travelling_ranges(plan) -> Ranges:
    """Global query rows that travel."""
    if plan.travel is None:
        return NO_RANGES
    send = np.asarray(plan.travel.comm.send, np.int64)
    rank, entry = np.nonzero(send[:, :, N_ROWS])
    begin, rows = send[rank, entry, SRC_ROW], send[rank, entry, N_ROWS]
    source, row = intervals.expand(begin, rows)
    position = np.unique(np.asarray(plan.positions, np.int64)[rank[source], row])
    _, begin, end = intervals.union(np.zeros_like(position), position, position + 1)
    return Ranges(begin, end)


def _works(
    plan, moved: np.ndarray, model: CostModel, per_node: int
) -> list[timeline.DirectionWork]:
    """Kernel and transfer times of both directions, read off the plan's tables; late queries as one more
    stage.
    """
    works = []
    for backward, stages in enumerate((plan.forward_stages, plan.backward_stages)):
        slices = [_stage_slices(table) for table in _tables(stages)]
        shapes = timeline.shapes_of(slices, plan.cp_size, model)
        travel = None
        if plan.travel is not None and moved.any():
            away = _stage_slices(plan.travel.calc)
            travel = timeline.travel_work(away, moved, per_node, model, bool(backward))
        rows = timeline.link_rows(_traffic(_transfers(stages), plan.cp_size), per_node)
        merged_rows = (
            plan.spec.local_len if stages.comm else _most_late(stages, plan.spec.local_len)
        )
        sizes = merged_rows, model, bool(backward)
        works.append(timeline.direction_work(shapes, rows, *sizes, travel))
    return works


def _tables(stages: StageTables) -> list[SliceTable]:
    """Of all stages, then that of late queries."""
    return [*stages.calc, *([] if stages.late is None else [stages.late.calc])]


def _transfers(stages: StageTables) -> list[CommMeta]:
    """That feed all remote stages, then late queries."""
    return [*stages.comm, *([] if stages.late is None else [stages.late.comm])]


def _most_late(stages: StageTables, local_len: int) -> int:
    """Late rows of the rank that has most."""
    if stages.late is None:
        return 0
    return int((np.asarray(stages.late.rows) < local_len).sum(axis=1).max())


def _stage_slices(table: SliceTable) -> StageSlices:
    slices = np.asarray(table.slices, np.int64)
    rank, entry = np.nonzero(slices[:, :, bands.Q_START] < slices[:, :, bands.Q_END])
    return StageSlices(slices[rank, entry], rank)


def _areas(table: SliceTable) -> np.ndarray:
    """Pairs of each rank, int64 ``[cp]``."""
    slices = np.asarray(table.slices, np.int64)
    return bands.area(slices.reshape(-1, bands.NUM_COLUMNS)).reshape(len(slices), -1).sum(axis=1)


def require_concrete(plan, name: str) -> None:
    """Raises ValueError unless the plan is one whole plan with values."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(plan)):
        raise ValueError(
            f"{name}() reads the values of a plan, a traced plan has none: call it outside jit"
        )
    shape = np.shape(plan.positions)
    if shape != (plan.cp_size, plan.spec.local_len):
        raise ValueError(
            f"{name}() wants one whole plan with positions [{plan.cp_size}, {plan.spec.local_len}],"
            f" got {list(shape)}: a stacked or local plan is something else"
        )


def _traffic(comm, cp_size: int) -> np.ndarray:
    """Rows from each source to each other destination in each stage, int64 ``[stages, cp, cp]``."""
    rows = np.zeros((len(comm), cp_size, cp_size), np.int64)
    for stage, meta in enumerate(comm):
        send = np.asarray(meta.send, np.int64)
        src, entry = np.nonzero(send[:, :, N_ROWS])
        np.add.at(rows[stage], (src, send[src, entry, PEER]), send[src, entry, N_ROWS])
    # Own keys of late queries cross nothing.
    return rows * ~np.eye(cp_size, dtype=bool)


def _distinct_rows(plan) -> int:
    """Distinct (destination, source, row) triples over all stages."""
    tables = [np.asarray(meta.recv, np.int64) for meta in _transfers(plan.forward_stages)]
    recv = np.concatenate(tables, axis=1)
    is_own = recv[:, :, PEER] == np.arange(plan.cp_size)[:, None]
    dst, entry = np.nonzero(recv[:, :, N_ROWS] * ~is_own)
    pieces = recv[dst, entry]
    group = dst * plan.cp_size + pieces[:, PEER]
    begin = pieces[:, SRC_ROW]
    _, begin, end = intervals.union(group, begin, begin + pieces[:, N_ROWS])
    return int((end - begin).sum())
