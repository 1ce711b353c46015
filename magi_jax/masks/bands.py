"""Geometry of band slices, vectorised over rows of an int64 array.

A slice is a row ``(q_start, q_end, k_start, k_end, d_min, d_max)``. Query ``q`` sees key ``k`` when

    q_start <= q < q_end,   k_start <= k < k_end,   d_min <= k - q <= d_max.

Every function here takes and returns such rows, shape ``[A, 6]``. Masks, solvers and kernel tables
all cut, shift and measure slices with these functions and no others.

A *tight* slice has no slack: each range edge and each diagonal is touched by a visible cell. The
tight form is unique, so tight rows can be compared; an invisible slice becomes a row of zeros. The
visible keys of any run of consecutive queries of a tight slice form one interval without holes,
since both bounds move by at most one key from one query to the next.
"""

import numpy as np

Q_START, Q_END, K_START, K_END, D_MIN, D_MAX = range(6)
NUM_COLUMNS = 6


def tighten(slices: np.ndarray) -> np.ndarray:
    """Removes all slack; rows without a visible cell become zeros. Shape ``[A, 6]`` in and out."""
    q0, q1, k0, k1, d0, d1 = np.asarray(slices, np.int64).T
    # A diagonal d meets the rectangle when it passes between its two extreme corners.
    d0 = np.maximum(d0, k0 - (q1 - 1))
    d1 = np.minimum(d1, (k1 - 1) - q0)
    # Query q has a key when [max(k0, q + d0), min(k1 - 1, q + d1)] is not empty; likewise for keys.
    tight_q0 = np.maximum(q0, k0 - d1)
    tight_q1 = np.minimum(q1, k1 - d0)
    tight_k0 = np.maximum(k0, q0 + d0)
    tight_k1 = np.minimum(k1, q1 + d1)
    visible = (q0 < q1) & (k0 < k1) & (d0 <= d1) & (tight_q0 < tight_q1) & (tight_k0 < tight_k1)
    rows = np.stack([tight_q0, tight_q1, tight_k0, tight_k1, d0, d1], axis=1)
    return np.where(visible[:, None], rows, 0)


def clip(
    slices: np.ndarray,
    *,
    q_start: np.ndarray | int | None = None,
    q_end: np.ndarray | int | None = None,
    k_start: np.ndarray | int | None = None,
    k_end: np.ndarray | int | None = None,
) -> np.ndarray:
    """Cuts slices to query and key intervals (scalars or one per row); the result is tight."""
    rows = np.array(slices, np.int64)
    if q_start is not None:
        rows[:, Q_START] = np.maximum(rows[:, Q_START], q_start)
    if q_end is not None:
        rows[:, Q_END] = np.minimum(rows[:, Q_END], q_end)
    if k_start is not None:
        rows[:, K_START] = np.maximum(rows[:, K_START], k_start)
    if k_end is not None:
        rows[:, K_END] = np.minimum(rows[:, K_END], k_end)
    return tighten(rows)


def shift(slices: np.ndarray, q_offset: np.ndarray | int, k_offset: np.ndarray | int) -> np.ndarray:
    """Moves queries by ``q_offset`` and keys by ``k_offset`` positions (scalars or one per row)."""
    rows = np.array(slices, np.int64)
    rows[:, Q_START:K_START] += np.reshape(q_offset, (-1, 1))
    rows[:, K_START:D_MIN] += np.reshape(k_offset, (-1, 1))
    rows[:, D_MIN:] += np.reshape(np.asarray(k_offset) - np.asarray(q_offset), (-1, 1))
    return rows


def transpose(slices: np.ndarray) -> np.ndarray:
    """Swaps the roles of queries and keys."""
    q0, q1, k0, k1, d0, d1 = np.asarray(slices, np.int64).T
    return np.stack([k0, k1, q0, q1, -d1, -d0], axis=1)


def intersect(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row by row intersection of two sets of slices, ``[A, 6]`` each; the result is tight."""
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    lower = np.maximum(a, b)
    upper = np.minimum(a, b)
    columns = [lower[:, Q_START], upper[:, Q_END], lower[:, K_START], upper[:, K_END]]
    return tighten(np.stack([*columns, lower[:, D_MIN], upper[:, D_MAX]], axis=1))


def subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Row by row difference: cells of ``a`` outside ``b`` as disjoint tight slices ``[A, 6, 6]``.

    The six of each row are the queries before and after ``b`` and, in its queries, the keys before
    it, below its band, above its band and after it; those without a cell are zeros.
    """
    a = np.asarray(a, np.int64)
    common = intersect(a, b)
    pieces = np.repeat(a[:, None], 6, axis=1)
    pieces[:, 0, Q_END] = common[:, Q_START]
    pieces[:, 1, Q_START] = common[:, Q_END]
    pieces[:, 2:, Q_START:K_START] = common[:, None, Q_START:K_START]
    # The rows of a tight slice have low < k_end and high > k_start, so the band pieces stay inside
    # its keys.
    pieces[:, 2, K_END] = np.minimum(a[:, K_END], common[:, K_START])
    pieces[:, 3, K_START] = np.maximum(a[:, K_START], common[:, K_START])
    pieces[:, 3, D_MAX] = np.minimum(a[:, D_MAX], common[:, D_MIN] - 1)
    pieces[:, 4, K_END] = np.minimum(a[:, K_END], common[:, K_END])
    pieces[:, 4, D_MIN] = np.maximum(a[:, D_MIN], common[:, D_MAX] + 1)
    pieces[:, 5, K_START] = np.maximum(a[:, K_START], common[:, K_END])
    apart = ~is_visible(common)
    pieces[apart, 0] = a[apart]
    pieces[apart, 1:] = 0
    return tighten(pieces.reshape(-1, NUM_COLUMNS)).reshape(-1, 6, NUM_COLUMNS)


def area(slices: np.ndarray) -> np.ndarray:
    """Visible (query, key) pairs of each slice, int64 ``[A]``, in closed form."""
    q0, q1, k0, k1, d0, d1 = np.asarray(slices, np.int64).T
    width = np.maximum(k1 - k0, 0)
    rows = np.where(q1 > q0, 1, 0)

    def cells_up_to(d):
        """Cells with k - q <= d: a sum over queries of clip(q + d - k0 + 1, 0, width)."""
        last, before_first = q1 + d - k0, q0 + d - k0
        return _ramp_sum(last, width) - _ramp_sum(before_first, width)

    return np.where(d0 <= d1, cells_up_to(d1) - cells_up_to(d0 - 1), 0) * rows


def _ramp_sum(x: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Sum of clip(j, 0, width) over all integers j <= x."""
    rising = np.maximum(x, 0)
    beyond = np.maximum(x - width, 0)
    return rising * (rising + 1) // 2 - beyond * (beyond + 1) // 2


def key_bounds(slices: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Visible keys ``[low, high)`` of one query per row; empty intervals have ``low == high``."""
    q0, q1, k0, k1, d0, d1 = np.asarray(slices, np.int64).T
    low = np.maximum(k0, queries + d0)
    high = np.minimum(k1, queries + d1 + 1)
    inside = (queries >= q0) & (queries < q1) & (low < high)
    return np.where(inside, low, 0), np.where(inside, high, 0)


def is_visible(slices: np.ndarray) -> np.ndarray:
    """Boolean ``[A]``: whether a tight row has any cell."""
    return slices[:, Q_START] < slices[:, Q_END]
