"""Dispatch: which rank owns which tokens.

A strategy cuts ``[0, seq_len)`` into units and gives each to a rank. All have the signature
``strategy(problem) -> Assignment`` and are chosen by name from `strategies.STRATEGIES`. Units may have any
lengths; the ones here use whole chunks, with ``floor(C / cp)`` or ``ceil(C / cp)`` of the ``C``
chunks per rank.
"""

import heapq
from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals


class DispatchProblem(NamedTuple):
    """What a strategy may look at.

    Attributes:
        slices: tight visible slices ``[A, 6]``, int64, of queries whose keys come to them.
        edges: chunk edges ``[C + 1]`` from 0 to ``seq_len``.
        cp_size: number of ranks.
        ranks_per_node: ranks that share a fast link; None = all of them.
        effort: "fast" or "high"; how long `balanced` searches.
        engine: "compiled" or "numpy"; what `balanced` searches with. Both find the same.
        travelling: slices ``[B, 6]`` of queries that travel: the work falls on the owners of keys.
        row_weight: what moving a travelling query row costs, in rows of keys and values.
    """

    slices: np.ndarray
    edges: np.ndarray
    cp_size: int
    ranks_per_node: int | None = None
    effort: str = "fast"
    engine: str = "compiled"
    travelling: np.ndarray = np.zeros((0, bands.NUM_COLUMNS), np.int64)
    row_weight: float = 1.0


class Assignment(NamedTuple):
    """Units and their ranks: ``edges [U + 1]`` from 0 to ``seq_len``, ``owner [U]``."""

    edges: np.ndarray
    owner: np.ndarray


class Layout(NamedTuple):
    """Segments of the sequence in global order; neighbours have different owners.

    Attributes:
        edges: ``[G + 1]`` from 0 to ``seq_len``; segment ``g`` is ``[edges[g], edges[g + 1])``.
        owner: ``[G]`` its rank.
        local_start: ``[G]`` its first row at the owner; each rank keeps its segments in global
            order.
        cp_size: number of ranks.
    """

    edges: np.ndarray
    owner: np.ndarray
    local_start: np.ndarray
    cp_size: int

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return int(self.edges[-1])

    @property
    def offset(self) -> np.ndarray:
        """``[G]`` what is added to a global position of a segment to get its local row."""
        return self.local_start - self.edges[:-1]

    def segment_of(self, position: np.ndarray) -> np.ndarray:
        """Segment of each global position."""
        return np.searchsorted(self.edges, position, side="right") - 1


def chunk_edges(seq_len: int, chunk_size: int) -> np.ndarray:
    """Edges ``[C + 1]`` of chunks of ``chunk_size`` tokens; the last may be short."""
    return np.append(np.arange(0, seq_len, chunk_size), seq_len)


def make_layout(assignment: Assignment, cp_size: int) -> Layout:
    """Merges neighbouring units of one owner and packs each rank's segments in global order."""
    size = np.diff(assignment.edges)
    edges, owner = assignment.edges[:-1][size > 0], assignment.owner[size > 0]
    first = np.flatnonzero(np.diff(owner, prepend=-1) != 0)
    edges = np.append(edges[first], assignment.edges[-1])
    owner = owner[first]
    order = np.argsort(owner, kind="stable")
    local_start = np.empty_like(owner)
    local_start[order] = intervals.offsets(owner[order], np.diff(edges)[order], cp_size)
    return Layout(edges, owner, local_start, cp_size)


def cut_at(slices: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slices cut at query ``edges``: (interval of each piece, tight pieces ``[C, 6]``), visible ones
    only.
    """
    source, part = intervals.meet(
        slices[:, bands.Q_START], slices[:, bands.Q_END], edges[:-1], edges[1:]
    )
    cut = bands.clip(slices[source], q_start=edges[part], q_end=edges[part + 1])
    seen = bands.is_visible(cut)
    return part[seen], cut[seen]


def areas(part: np.ndarray, cut: np.ndarray, num_parts: int) -> np.ndarray:
    """Cells of each part, int64 ``[num_parts]``."""
    # Float64 sums are exact below 2**53 cells.
    return np.bincount(part, weights=bands.area(cut), minlength=num_parts).astype(np.int64)


def chunk_areas(problem: DispatchProblem) -> np.ndarray:
    """Work that comes with each chunk, int64 ``[C]``: of its queries, and of queries that travel to its
    keys.
    """
    edges = problem.edges
    area = areas(*cut_at(problem.slices, edges), len(edges) - 1)
    if len(problem.travelling):
        area += areas(*cut_at(bands.transpose(problem.travelling), edges), len(edges) - 1)
    return area


def contiguous(problem: DispatchProblem) -> Assignment:
    """Each rank gets one run of consecutive chunks: best for windows, worst for the balance of
    causal masks.
    """
    # Reversed, so that a short last chunk is an extra one and token counts differ by one chunk.
    owner = np.repeat(np.arange(problem.cp_size), _chunk_counts(problem)[::-1])
    return Assignment(problem.edges, owner)


def zigzag(problem: DispatchProblem) -> Assignment:
    """Rank ``r`` gets the ``r``-th run of half shards from the front and the ``r``-th from the
    back.

    Exact balance for a causal mask, as in the striped or zigzag form of ring attention.
    """
    counts = _chunk_counts(problem)
    ranks = np.arange(problem.cp_size)
    front = (counts + 1) // 2
    owner = np.repeat(
        np.concatenate([ranks, ranks[::-1]]), np.concatenate([front, (counts - front)[::-1]])
    )
    return Assignment(problem.edges, owner)


def lpt(problem: DispatchProblem) -> Assignment:
    """Longest processing time first: chunks by falling area, each to the least loaded rank.

    Graham's list scheduling with equal chunk counts; balances area and looks at nothing else.
    """
    area = chunk_areas(problem)
    low, spare = divmod(len(area), problem.cp_size)  # `spare` ranks hold one chunk more than `low`
    order = np.argsort(-area, kind="stable").tolist()
    size = np.diff(problem.edges)
    if spare and size[-1] < size[0]:
        # A short chunk must be an extra one, or two ranks differ by more than a chunk.
        order.remove(len(area) - 1)
        order.insert(0, len(area) - 1)
        spare -= 1
        limit = [low + 1] + [low] * (problem.cp_size - 1)
    else:
        limit = [low] * problem.cp_size
    owner = np.empty(len(area), np.int64)
    held = [0] * problem.cp_size
    heap = [(0.0, rank) for rank in range(problem.cp_size)]
    for chunk in order:
        load, rank = heapq.heappop(heap)
        while held[rank] == limit[rank] and not (spare and limit[rank] == low):
            load, rank = heapq.heappop(heap)  # full for good
        if held[rank] == limit[rank]:
            limit[rank] += 1
            spare -= 1
        held[rank] += 1
        owner[chunk] = rank
        heapq.heappush(heap, (load + float(area[chunk]), rank))
    return Assignment(problem.edges, owner)


def _chunk_counts(problem: DispatchProblem) -> np.ndarray:
    """Chunks of each rank, as equal as can be and falling, ``[cp]``."""
    low, wide_ranks = divmod(len(problem.edges) - 1, problem.cp_size)
    return low + (np.arange(problem.cp_size) < wide_ranks)
