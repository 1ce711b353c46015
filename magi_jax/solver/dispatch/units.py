"""What the balanced dispatcher places: units, the key rows that they need, and their work.

A unit is a chunk, or a part of a chunk that is too heavy for one rank. Key rows are grouped into *spans*:
runs of rows of one unit that the same units need. Spans that no other unit needs never cross ranks and are
left out, so that a search looks at a few hundred of them.

Queries that travel turn this around. Their rows are a span of the unit that holds them, weighed by what a
query row costs to move, and needed by all units whose keys they see; the work falls on those units.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.dispatch.problem import DispatchProblem, areas, cut_at
from magi_jax.solver.engine import compiled

# A chunk is split when it overloads its rank even beside light chunks, and is a good part of its work.
OVERLOAD = 1.002
HEAVY_SHARE = 0.4
LIGHT_QUANTILE = 0.1
# When whole chunks do not balance, those with more than this share of the mean are split as well.
COARSE_SHARE = 0.1
# (heavy chunks for each rank, parts of each) to split in further attempts.
FINENESS = ((0.0, 1), (1.0, 2), (0.5, 4))
# Its parts are to have at most this share of a rank's mean area.
PART_SHARE = 0.55
MAX_PARTS = 16
MIN_PART_ROWS = 16
# Work of heavy chunks that goes into one place, as a share of the mean: settles how many are split.
PLACE_SHARE = 0.3


class Units(NamedTuple):
    """Units to place, the first ``U`` of them real, the rest blanks that fill the ranks up.

    Attributes:
        edges: ``[U + 1]`` from 0 to ``seq_len``; edges of the real units.
        chunk: ``[U]`` chunk that each real unit is part of.
        area: ``[U + B]`` visible cells, int64.
        size: ``[U + B]`` tokens of the place that a unit takes, int32; only like sizes trade places.
        spare: ``[U + B]`` 1 for units that hold fewer tokens than their size; a rank gets at most one.
        rows: ``[V]`` key rows of each span, int32.
        span_ptr: ``[U + B + 1]`` spans of each unit, int32.
        need_ptr: ``[U + B + 1]`` intervals of ``needs`` of each unit, int32.
        needs: ``[I, 2]`` intervals of spans, int32.
        need_rows: ``[U + B]`` distinct key rows that each unit sees.
        slot: tokens of a chunk.
        slots: chunks of a rank at most.
        split_chunks: chunks that are split.
        light_area: area of a light chunk, one of the lowest tenth.
    """

    edges: np.ndarray
    chunk: np.ndarray
    area: np.ndarray
    size: np.ndarray
    spare: np.ndarray
    rows: np.ndarray
    span_ptr: np.ndarray
    need_ptr: np.ndarray
    needs: np.ndarray
    need_rows: np.ndarray
    slot: int
    slots: int
    split_chunks: int
    light_area: float


def make_units(problem: DispatchProblem, fineness: int = 0, engine: str = "numpy") -> Units:
    """Cuts the sequence into units and finds what each of them needs.

    Args:
        problem: what to dispatch.
        fineness: index of `FINENESS`; past 0 some of the heaviest chunks are split as well, for masks
            with so few sizes of chunks that no choice of whole ones is balanced.
        engine: "numpy" or "compiled"; both find the same.
    """
    edges = problem.edges
    area, needs = _work_of_units(problem, edges, engine)
    light_area = _quantile(area, LIGHT_QUANTILE)
    split, parts = _chunks_to_split(area, light_area, problem, fineness)
    slot = int(edges[1] - edges[0])
    if len(split):
        inner = edges[split][:, None] + slot // parts * np.arange(1, parts)
        edges = np.sort(np.concatenate([edges, inner.ravel()]))
        area, needs = _work_of_units(problem, edges, engine)

    num_chunks = len(problem.edges) - 1
    slots = -(-num_chunks // problem.cp_size)
    num_blanks = slots * problem.cp_size - num_chunks
    chunk = np.searchsorted(problem.edges, edges[:-1], side="right") - 1
    size = np.where(np.isin(chunk, split), slot // parts, slot)
    spare = np.diff(edges) < size
    need_rows = needs.total_rows
    if len(problem.travelling):
        needs = _with_travellers(needs, problem, edges)
    span_ptr = needs.span_ptr
    need_ptr = np.searchsorted(needs.reader, np.arange(len(edges)))
    blank = np.zeros(num_blanks, np.int64)
    return Units(
        edges=edges,
        chunk=chunk,
        area=np.concatenate([area, blank]),
        size=np.concatenate([size, blank + slot]).astype(np.int32),
        spare=np.concatenate([spare, blank + 1]).astype(np.int32),
        rows=needs.rows.astype(np.int32),
        span_ptr=np.concatenate([span_ptr, blank + span_ptr[-1]]).astype(np.int32),
        need_ptr=np.concatenate([need_ptr, blank + need_ptr[-1]]).astype(np.int32),
        needs=needs.spans.astype(np.int32),
        need_rows=np.concatenate([need_rows, blank]),
        slot=slot,
        slots=slots,
        split_chunks=len(split),
        light_area=light_area,
    )


def fixed_units(problem: DispatchProblem, edges: np.ndarray, engine: str = "numpy") -> Units:
    """Units between given ``edges``, to measure a placement with; they are of no use to a search."""
    area, needs = _work_of_units(problem, edges, engine)
    need_rows = needs.total_rows
    if len(problem.travelling):
        needs = _with_travellers(needs, problem, edges)
    size = np.diff(edges)
    num_units = len(size)
    return Units(
        edges=edges,
        chunk=np.arange(num_units),
        area=area,
        size=size.astype(np.int32),
        spare=np.zeros(num_units, np.int32),
        rows=needs.rows.astype(np.int32),
        span_ptr=needs.span_ptr.astype(np.int32),
        need_ptr=np.searchsorted(needs.reader, np.arange(num_units + 1)).astype(np.int32),
        needs=needs.spans.astype(np.int32),
        need_rows=need_rows,
        slot=int(size.max()),
        slots=num_units,
        split_chunks=0,
        light_area=0.0,
    )


def _quantile(values: np.ndarray, share: float) -> float:
    """`numpy.quantile`, which takes longer than to sort some hundred values."""
    ordered = np.sort(values)
    place = share * (len(values) - 1)
    below = int(place)
    beyond = place - below
    low, high = float(ordered[below]), float(ordered[min(below + 1, len(values) - 1)])
    step = high - low
    return low + step * beyond if beyond < 0.5 else high - step * (1 - beyond)


def _work_of_units(
    problem: DispatchProblem, edges: np.ndarray, engine: str
) -> tuple[np.ndarray, "_Needs"]:
    """The work of each unit ``[U]``, and the keys that they need."""
    if engine == "compiled":
        area, *needs = compiled().unit_needs(problem.slices, edges)
        needs = _Needs(*needs)
    else:
        unit, cut = cut_at(problem.slices, edges)
        area = areas(unit, cut, len(edges) - 1)
        needs = _key_needs(unit, cut, edges)
    if len(problem.travelling):
        area += areas(*cut_at(bands.transpose(problem.travelling), edges), len(edges) - 1)
    return area, needs


def _travelling_rows(problem: DispatchProblem, edges: np.ndarray) -> np.ndarray:
    """Query rows of each unit that travel, ``[U]``."""
    begin, end = problem.travelling[:, bands.Q_START], problem.travelling[:, bands.Q_END]
    _, begin, end = intervals.union(np.zeros_like(begin), begin, end)
    source, unit = intervals.meet(begin, end, edges[:-1], edges[1:])
    rows = np.minimum(end[source], edges[unit + 1]) - np.maximum(begin[source], edges[unit])
    return np.bincount(unit, rows, len(edges) - 1).astype(np.int64)


def _chunks_to_split(
    area: np.ndarray, light_area: float, problem: DispatchProblem, fineness: int
) -> tuple[np.ndarray, int]:
    """Chunks to split and into how many equal parts.

    Parts are to end up on different ranks, where something must fill the rest of their chunk's place:
    so the lightest chunks, which are cheap to scatter, are split in the same way.
    """
    none = np.zeros(0, np.int64), 1
    edges = problem.edges
    slot = int(edges[1] - edges[0])
    mean = area.sum() / problem.cp_size
    others = -(-len(area) // problem.cp_size) - 1
    may_split = np.diff(edges) == slot
    beside = area + others * light_area
    is_heavy = (beside > OVERLOAD * mean) & (area > HEAVY_SHARE * mean) & may_split
    per_rank, coarse_parts = FINENESS[fineness]
    if fineness:
        heaviest = np.argsort(-area, kind="stable")[: int(np.ceil(per_rank * problem.cp_size))]
        is_heavy[heaviest] |= (area[heaviest] > COARSE_SHARE * mean) & may_split[heaviest]
    travels = np.zeros(len(area), bool)
    if len(problem.travelling):  # whoever holds these rows sends them to nearly everyone
        travels = (_travelling_rows(problem, edges) > 0) & may_split
    heavy = np.flatnonzero(is_heavy | travels)
    if not len(heavy):
        return none
    parts = 1
    few = travels.any() or not fineness
    most = MAX_PARTS if few else coarse_parts
    while parts < most and slot % (2 * parts) == 0 and slot >= 2 * parts * MIN_PART_ROWS:
        parts *= 2
        if few and not travels.any() and _largest_part(heavy, parts, problem) <= PART_SHARE * mean:
            break
    if parts == 1:
        return none
    light = np.argsort(area, kind="stable")
    light = light[may_split[light] & ~is_heavy[light] & ~travels[light]]
    places = min(int(area[heavy].sum() / (PLACE_SHARE * mean)) + 1, len(heavy) * parts)
    places = max(places, min(int(travels.sum()) * parts, problem.cp_size))
    if fineness:  # heavy parts trade places with light ones, so there must be as many
        places = max(places, 2 * len(heavy))
    return np.sort(np.concatenate([heavy, light[: max(places - len(heavy), 0)]])), parts


def _largest_part(chunks: np.ndarray, parts: int, problem: DispatchProblem) -> int:
    """Largest area of a part when ``chunks`` are cut into ``parts`` equal parts."""
    step = int(problem.edges[1] - problem.edges[0]) // parts
    edges = np.unique(problem.edges[chunks][:, None] + step * np.arange(parts + 1))
    unit, cut = cut_at(problem.slices, edges)
    inside = np.diff(edges) == step  # the other gaps lie between chunks
    return int(areas(unit, cut, len(edges) - 1)[inside].max())


class _Needs(NamedTuple):
    """Spans and who needs them; names as in `Units`.

    Attributes:
        rows: ``[V]``.
        span_ptr: ``[U + 1]``.
        reader: ``[I]`` unit of each of ``spans``, rising.
        spans: ``[I, 2]`` intervals of spans, disjoint and rising within a unit.
        total_rows: ``[U]`` distinct key rows that each unit sees.
    """

    rows: np.ndarray
    span_ptr: np.ndarray
    reader: np.ndarray
    spans: np.ndarray
    total_rows: np.ndarray


def _key_needs(unit: np.ndarray, cut: np.ndarray, edges: np.ndarray) -> _Needs:
    """Spans of keys, without those that only their own unit needs."""
    num_units = len(edges) - 1
    unit, begin, end = intervals.union(unit, cut[:, bands.K_START], cut[:, bands.K_END])
    total_rows = np.bincount(unit, weights=end - begin, minlength=num_units).astype(np.int64)
    points = intervals.distinct(edges, begin, end)
    first, last = np.searchsorted(points, begin), np.searchsorted(points, end)
    needed_by = _coverage(first, last, len(points))
    own_begin, own_end = np.maximum(begin, edges[unit]), np.minimum(end, edges[unit + 1])
    own = own_begin < own_end
    needed_by_owner = _coverage(
        np.searchsorted(points, own_begin[own]), np.searchsorted(points, own_end[own]), len(points)
    )
    travels = needed_by > needed_by_owner
    place = np.concatenate([[0], np.cumsum(travels)])
    spans = np.stack([place[first], place[last]], axis=1)
    kept = spans[:, 0] < spans[:, 1]
    return _Needs(
        np.diff(points)[travels],
        place[np.searchsorted(points, edges)],
        unit[kept],
        spans[kept],
        total_rows,
    )


def _with_travellers(needs: _Needs, problem: DispatchProblem, edges: np.ndarray) -> _Needs:
    """Adds one span for each unit with travelling rows, needed by the units whose keys they see."""
    moved = _travelling_rows(problem, edges)
    holders = np.flatnonzero(moved)
    rows = np.maximum(np.rint(problem.row_weight * moved[holders]).astype(np.int64), 1)
    ends = needs.span_ptr[holders + 1]  # the new span follows the key spans of its unit
    place = ends + np.arange(len(holders))

    # Intervals of key spans, cut where a new span comes in between.
    points = intervals.distinct(np.zeros(1, np.int64), ends, needs.span_ptr[-1:])
    source, block = intervals.meet(needs.spans[:, 0], needs.spans[:, 1], points[:-1], points[1:])
    begin = np.maximum(needs.spans[source, 0], points[block])
    end = np.minimum(needs.spans[source, 1], points[block + 1])
    shift = np.searchsorted(ends, points[block], side="right")

    keys_of, cut = cut_at(bands.transpose(problem.travelling), edges)
    first = np.searchsorted(edges, cut[:, bands.K_START], side="right") - 1
    last = np.searchsorted(edges, cut[:, bands.K_END], side="left")
    first, last = np.searchsorted(holders, first), np.searchsorted(holders, last)
    piece, holder = intervals.expand(first, last - first)
    reader, begin, end = intervals.union(
        np.concatenate([needs.reader[source], keys_of[piece]]),
        np.concatenate([begin + shift, place[holder]]),
        np.concatenate([end + shift, place[holder] + 1]),
    )
    before = np.searchsorted(holders, np.arange(len(edges)))
    return needs._replace(
        rows=np.insert(needs.rows, ends, rows),
        span_ptr=needs.span_ptr + before,
        reader=reader,
        spans=np.stack([begin, end], axis=1),
    )


def _coverage(first: np.ndarray, last: np.ndarray, num_points: int) -> np.ndarray:
    """How many of the index intervals ``[first, last)`` cover each gap between points, ``[points - 1]``."""
    steps = np.bincount(first, minlength=num_points) - np.bincount(last, minlength=num_points)
    return np.cumsum(steps)[:-1]
