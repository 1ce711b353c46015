"""Which key rows the units of a sequence need, and from whom travelling queries want something."""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.dispatch.problem import DispatchProblem, cut_at


class Needs(NamedTuple):
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


def key_needs(unit: np.ndarray, cut: np.ndarray, edges: np.ndarray) -> Needs:
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
    return Needs(
        np.diff(points)[travels],
        place[np.searchsorted(points, edges)],
        unit[kept],
        spans[kept],
        total_rows,
    )


def with_travellers(needs: Needs, problem: DispatchProblem, edges: np.ndarray) -> Needs:
    """Adds one span for each unit with travelling rows, needed by the units whose keys they see."""
    moved = travelling_rows(problem, edges)
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


def travelling_rows(problem: DispatchProblem, edges: np.ndarray) -> np.ndarray:
    """Query rows of each unit that travel, ``[U]``."""
    begin, end = problem.travelling[:, bands.Q_START], problem.travelling[:, bands.Q_END]
    _, begin, end = intervals.union(np.zeros_like(begin), begin, end)
    source, unit = intervals.meet(begin, end, edges[:-1], edges[1:])
    rows = np.minimum(end[source], edges[unit + 1]) - np.maximum(begin[source], edges[unit])
    return np.bincount(unit, rows, len(edges) - 1).astype(np.int64)
