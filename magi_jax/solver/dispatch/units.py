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
from magi_jax.solver.dispatch.needs import Needs, key_needs, with_travellers
from magi_jax.solver.dispatch.problem import DispatchProblem, areas, cut_at
from magi_jax.solver.dispatch.split_chunks import chunks_to_split
from magi_jax.solver.engine import compiled

# Chunks whose area is below that of this share of all are light.
LIGHT_QUANTILE = 0.1


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
    split, parts = chunks_to_split(area, light_area, problem, fineness)
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
        needs = with_travellers(needs, problem, edges)
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
        needs = with_travellers(needs, problem, edges)
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
) -> tuple[np.ndarray, Needs]:
    """The work of each unit ``[U]``, and the keys that they need."""
    if engine == "compiled":
        area, *needs = compiled().unit_needs(problem.slices, edges)
        needs = Needs(*needs)
    else:
        unit, cut = cut_at(problem.slices, edges)
        area = areas(unit, cut, len(edges) - 1)
        needs = key_needs(unit, cut, edges)
    if len(problem.travelling):
        area += areas(*cut_at(bands.transpose(problem.travelling), edges), len(edges) - 1)
    return area, needs
