"""Joins and unions of sorted integer intervals, vectorised: the planner's only kind of loop."""

import numpy as np


def expand(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lists ``first[i], first[i] + 1, ...`` (``count[i]`` of them) for every ``i``.

    Returns:
        (source ``i``, listed value), both int64 ``[count.sum()]``, sources rising.
    """
    source = np.repeat(np.arange(len(count)), count)
    skipped = np.cumsum(count) - count
    return source, np.arange(len(source)) + np.repeat(first - skipped, count)


def distinct(*values: np.ndarray) -> np.ndarray:
    """All values once, rising. `numpy.unique` hashes them first, which takes ten times as long as sorting
    what is nearly in order.
    """
    found = np.concatenate(values)
    found.sort(kind="stable")
    return found[np.append(True, found[1:] != found[:-1])[: len(found)]]


def meet(
    begin: np.ndarray, end: np.ndarray, seg_begin: np.ndarray, seg_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All (interval, segment) pairs that share a position.

    Args:
        begin: first positions of non-empty intervals ``[I]``, in any order.
        end: their ends ``[I]``.
        seg_begin: first positions of disjoint non-empty segments ``[J]``, rising.
        seg_end: their ends ``[J]``.

    Returns:
        (interval index, segment index), sorted by both.
    """
    first = np.searchsorted(seg_end, begin, side="right")
    last = np.searchsorted(seg_begin, end, side="left")
    return expand(first, last - first)


def starts_union(group: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Marks intervals, sorted by (group, begin), that neither touch nor overlap an earlier one of
    their group.
    """
    if not len(group):
        return np.zeros(0, bool)
    new_group = np.diff(group, prepend=group[0] - 1) != 0
    # A running maximum per group: lift each group above all ends of the groups before it.
    lift = (end.max() + 1) * (np.cumsum(new_group) - 1)
    reach = np.maximum.accumulate(end + lift)
    starts = new_group
    starts[1:] |= (begin + lift)[1:] > reach[:-1]
    return starts


def union(
    group: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Union of intervals per group: maximal disjoint ``(group, begin, end)``, sorted by (group,
    begin).
    """
    order = np.lexsort((begin, group))
    group, begin, end = group[order], begin[order], end[order]
    first = np.flatnonzero(starts_union(group, begin, end))
    merged_end = np.maximum.reduceat(end, first) if len(first) else end
    return group[first], begin[first], merged_end


def offsets(group: np.ndarray, size: np.ndarray, num_groups: int) -> np.ndarray:
    """Sum of the sizes that precede each entry in its group; ``group`` is rising."""
    total = np.cumsum(size)
    before = np.concatenate([[0], total])
    base = before[np.searchsorted(group, np.arange(num_groups))]
    return total - size - base[group]
