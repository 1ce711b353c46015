"""Exact check that no cell belongs to two slices."""

import bisect

import numpy as np

from magi_jax.masks import bands


def find_overlap(slices: np.ndarray) -> tuple[int, int] | None:
    """Row numbers of two tight slices of ``slices [A, 6]`` that share a cell, None if none do.

    Slices whose query ranges (or key ranges) do not overlap are settled by one sort. All others go
    through a sweep over queries, O(A log A), that keeps the active slices ordered by key.
    """
    visible = np.flatnonzero(bands.is_visible(slices))
    rows = slices[visible]
    if _apart(rows[:, bands.Q_START], rows[:, bands.Q_END]):
        return None
    if _apart(rows[:, bands.K_START], rows[:, bands.K_END]):
        return None
    pair = _sweep(rows)
    if pair is None:
        return None
    first, second = sorted(int(visible[i]) for i in pair)
    return first, second


def shared_cell(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """One (query, key) that two overlapping rows ``[6]`` share."""
    common = bands.intersect(a[None], b[None])
    query = common[:, bands.Q_START]
    return int(query[0]), int(bands.key_bounds(common, query)[0][0])


def _apart(start: np.ndarray, end: np.ndarray) -> bool:
    order = np.argsort(start, kind="stable")
    return bool((end[order][:-1] <= start[order][1:]).all())


def _sweep(rows: np.ndarray) -> tuple[int, int] | None:
    """Walks queries upwards; neighbours in key order are compared when they become neighbours.

    Why that is exact: the visible keys of a tight slice are an interval in each of its queries, and
    both ends move by 0 or 1 per query. So two slices that have not met yet keep their order, and in
    the first query where any two slices meet, two that are neighbours in key order meet.
    """
    table = rows.tolist()
    count = len(table)
    # Ends come before starts of the same query.
    query = np.concatenate([rows[:, bands.Q_END], rows[:, bands.Q_START]])
    is_start = np.repeat([0, 1], count)
    events = np.lexsort((is_start, query))
    active: list[int] = []

    for event, at in zip(events.tolist(), query[events].tolist(), strict=True):
        starting, index = divmod(event, count)
        # A slice that ends has its last visible key in the query before.
        row = at if starting else at - 1

        def first_key(i, row=row):
            return max(table[i][bands.K_START], row + table[i][bands.D_MIN])

        place = bisect.bisect_left(active, first_key(index), key=first_key)
        if starting:
            active.insert(place, index)
            neighbours = [(place - 1, place), (place, place + 1)]
        else:
            # Slices of this row that began at the same key were refused when they met.
            assert active[place] == index
            del active[place]
            neighbours = [(place - 1, place)]
        for low, high in neighbours:
            if low >= 0 and high < len(active) and _meet(table[active[low]], table[active[high]]):
                return active[low], active[high]
    return None


def _meet(a: list[int], b: list[int]) -> bool:
    """Whether two tight rows share a cell: `bands.intersect`, in plain integers."""
    q0, q1 = max(a[0], b[0]), min(a[1], b[1])
    k0, k1 = max(a[2], b[2]), min(a[3], b[3])
    d0, d1 = max(a[4], b[4], k0 - q1 + 1), min(a[5], b[5], k1 - 1 - q0)
    return (
        q0 < q1
        and k0 < k1
        and d0 <= d1
        and max(q0, k0 - d1) < min(q1, k1 - d0)
        and max(k0, q0 + d0) < min(k1, q1 + d1)
    )
