"""Reads a plan's report off its tables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from magi_jax.masks import AttnMask, bands
from magi_jax.masks.attn_mask import require_mask
from magi_jax.plan.lay_out.dispatch import layout_of
from magi_jax.plan.recognise import first_other_query
from magi_jax.plan.report import PlanReport
from magi_jax.plan.spec import OWN_KEYS
from magi_jax.plan.tables import (
    SEGMENT_ROWS,
    AnyComm,
    CommMeta,
    SliceTable,
    StageTables,
    TwoLevelComm,
)
from magi_jax.plan.two_level import pieces_of, rows_between, rows_on_links
from magi_jax.solver import intervals
from magi_jax.solver.cost import schedule, timeline
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.dispatch import DispatchProblem, chunk_edges
from magi_jax.solver.dispatch.bounds import Bounds, lower_bounds
from magi_jax.solver.dispatch.split_chunks import MAX_PARTS
from magi_jax.solver.dispatch.units import fixed_units
from magi_jax.solver.overlap.own_first import first_us
from magi_jax.solver.overlap.travelling import NO_RANGES, Ranges, split_slices
from magi_jax.solver.work.stages import StageSlices
from magi_jax.solver.work.transfer import Pieces


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
        ranks_per_node: ranks that share a fast link; None takes the nodes that rows of the plan cross
            once, or all ranks for one node.
        mask: the mask that was planned, for the lower bounds.

    Raises:
        ValueError: the plan is traced, stacked or local, so that there are no tables to count; its nodes
            are others; or bounds are asked for of cross-attention or of another mask.
    """
    require_concrete(plan, "report")
    cp_size = plan.cp_size
    per_node = _node_of(plan, ranks_per_node)
    transfers = _transfers(plan.forward_stages)
    rows = _others(_each(rows_between, transfers, cp_size))
    travel = plan.travel
    moved = np.zeros((cp_size, cp_size), np.int64)
    if travel is not None:
        moved = rows_between(travel.comm)
    works = _works(plan, cost_model or CostModel(), per_node)
    received = int(rows.sum())
    report = PlanReport(
        seq_len=plan.spec.seq_len,
        local_len=plan.spec.local_len,
        tokens=np.asarray(plan.dispatch.segments, np.int64)[:, :, SEGMENT_ROWS].sum(axis=1),
        area=np.stack([_areas(table) for table in _tables(plan.forward_stages)]),
        traffic=rows,
        ranks_per_node=per_node,
        two_level=_in_two_steps(transfers),
        link_traffic=_each(rows_on_links, transfers, cp_size),
        backward_stages=len(_transfers(plan.backward_stages)),
        travel_area=np.zeros(cp_size, np.int64) if travel is None else _areas(travel.calc),
        travel_traffic=moved,
        buffer_rows=np.array([meta.dst_rows for meta in transfers], np.int64),
        wire_rows=np.array([meta.spec.wire_rows for meta in transfers], np.int64),
        redundancy=received / max(_distinct_rows(plan), 1) if received else 1.0,
        planning_ms=plan.planning_ms,
        forward=schedule.simulate(works[0]),
        backward=schedule.simulate(works[1]),
        forward_kernel_us=works[0].busy_us,
        backward_kernel_us=works[1].busy_us,
        is_cross=plan.spec.keys != OWN_KEYS,
    )
    return report if mask is None else _with_bounds(report, plan, mask)


def _with_bounds(report: PlanReport, plan, mask: AttnMask) -> PlanReport:
    """The report with lower bounds, once it is sure that the mask is the one that was planned."""
    require_mask(mask)
    if report.is_cross:
        raise ValueError(
            "lower bounds are of self-attention; the keys of this plan are other tokens"
        )
    if mask.area != (planned := int(report.rank_area.sum())):
        raise ValueError(
            f"mask is another one: it shows {mask.area} pairs, the plan computes {planned}"
        )
    query = first_other_query(plan, mask)
    if query is not None:
        raise ValueError(
            f"mask is another one: it shows as many pairs as the plan computes, {planned}, but query"
            f" {query} sees other keys"
        )
    return replace(report, bounds=_bounds(plan, mask, report.imbalance, report.ranks_per_node))


def _node_of(plan, ranks_per_node: int | None) -> int:
    """Ranks of a node: as the plan has them, or as the caller says."""
    found = plan.spec.ranks_per_node
    if found is not None and ranks_per_node not in (None, found):
        raise ValueError(
            f"rows of this plan cross between nodes of {found} ranks, but ranks_per_node={ranks_per_node}"
        )
    return found or ranks_per_node or plan.cp_size


def _bounds(plan, mask: AttnMask, imbalance: float, ranks_per_node: int) -> Bounds:
    """Lower bounds for all dispatches that are no less balanced than the plan.

    The units are the smallest parts into which a strategy may split a chunk, cut where this plan cuts too, so
    that the bounds hold for whole chunks, for split ones, and for this plan.
    """
    part = plan.spec.chunk_size // math.gcd(plan.spec.chunk_size, MAX_PARTS)
    own = layout_of(plan.dispatch, plan.cp_size).edges
    edges = np.union1d(chunk_edges(plan.spec.seq_len, part), own)
    home, travelling = split_slices(mask.slices, _travelling_ranges(plan))
    problem = DispatchProblem(home, edges, plan.cp_size, travelling=travelling)
    units = fixed_units(problem, edges)._replace(slot=plan.spec.local_len, slots=1)
    return lower_bounds(units, plan.cp_size, ranks_per_node, imbalance)


def _travelling_ranges(plan) -> Ranges:
    """Global query rows that travel."""
    if plan.travel is None:
        return NO_RANGES
    moved = pieces_of(plan.travel.comm)
    source, row = intervals.expand(moved.src_row, moved.n_rows)
    position = np.unique(np.asarray(plan.positions, np.int64)[moved.src[source], row])
    _, begin, end = intervals.union(np.zeros_like(position), position, position + 1)
    return Ranges(begin, end)


def _works(plan, model: CostModel, per_node: int) -> list[timeline.DirectionWork]:
    """Kernel and transfer times of both directions, read off the plan's tables; late queries as one more
    stage.
    """
    works = []

    def links(comm):
        return timeline.link_rows(_each(rows_on_links, comm, plan.cp_size), per_node)

    for backward, stages in enumerate((plan.forward_stages, plan.backward_stages)):
        slices = [_stage_slices(table) for table in _tables(stages)]
        shapes = timeline.shapes_of(slices, plan.cp_size, model)
        travel = None
        if plan.travel is not None and rows_between(plan.travel.comm).any():
            near, far = (rows[0] for rows in links([plan.travel.comm]))
            away = _stage_slices(plan.travel.calc)
            two_level = _in_two_steps([plan.travel.comm])
            local_len = plan.spec.local_len
            travel = timeline.travel_work(
                away, (near, far), local_len, model, bool(backward), two_level
            )
        sizes, transfers = (bool(stages.comm), model, bool(backward)), _transfers(stages)
        two_level = _in_two_steps(transfers)
        near = tuple(isinstance(m, CommMeta) for m in transfers) if two_level else ()
        rows = timeline.link_rows(_moved_rows(stages, plan.cp_size), per_node)
        found = timeline.direction_work(shapes, rows, *sizes, travel, two_level, near)
        if stages.first is not None:
            first = timeline.shapes_of([_stage_slices(stages.first)], plan.cp_size, model)
            found = found._replace(first_us=first_us(first, model))
        works.append(found)
    return works


def _tables(stages: StageTables) -> list[SliceTable]:
    """Of all stages, then that of late queries."""
    return [*stages.calc, *([] if stages.late is None else [stages.late.calc])]


def _transfers(stages: StageTables) -> list[AnyComm]:
    """That feed all remote stages, then late queries."""
    return [*stages.comm, *([] if stages.late is None else [stages.late.comm])]


def _moved_rows(stages: StageTables, cp_size: int) -> np.ndarray:
    """Rows that each transfer moves between ranks ``[S, cp, cp]``, own keys of late queries included: they
    are copied into the buffer as others come.
    """
    rows = _each(rows_on_links, stages.comm, cp_size)
    if stages.late is None:
        return rows
    return np.concatenate([rows, _each(rows_between, [stages.late.comm], cp_size)])


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


def _each(count: Callable[[AnyComm], np.ndarray], comm, cp_size: int) -> np.ndarray:
    """Counts of each stage from each source to each destination, int64 ``[stages, cp, cp]``."""
    return np.array([count(meta) for meta in comm], np.int64).reshape(-1, cp_size, cp_size)


def _others(rows: np.ndarray) -> np.ndarray:
    """Without own keys of late queries, which cross nothing."""
    return rows * ~np.eye(rows.shape[-1], dtype=bool)


def _in_two_steps(transfers: Sequence[AnyComm]) -> bool:
    """Whether what moves takes two steps; transfers that only a spec has move nothing."""
    return any(isinstance(m, TwoLevelComm) and rows_between(m).any() for m in transfers)


def _distinct_rows(plan) -> int:
    """Distinct (destination, source, row) triples over all stages."""
    found = [pieces_of(meta) for meta in _transfers(plan.forward_stages)]
    pieces = Pieces(*(np.concatenate(column) for column in zip(*found, strict=True)))
    pieces = Pieces(*(column[pieces.src != pieces.dst] for column in pieces))
    group = pieces.dst * plan.cp_size + pieces.src
    _, begin, end = intervals.union(group, pieces.src_row, pieces.src_row + pieces.n_rows)
    return int((end - begin).sum())
