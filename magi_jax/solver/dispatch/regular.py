"""Strategies that look at areas alone, or at nothing: contiguous, zigzag, and longest first.

Units are whole chunks, ``floor(C / cp)`` or ``ceil(C / cp)`` of the ``C`` chunks per rank.
"""

import heapq

import numpy as np

from magi_jax.solver.dispatch.problem import Assignment, DispatchProblem, chunk_areas


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
