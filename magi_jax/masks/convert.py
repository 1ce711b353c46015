"""Slices as dense arrays, counts and mask types."""

import numpy as np

from magi_jax.masks import bands
from magi_jax.masks.attn_slice import MaskType


def dense(slices: np.ndarray, q_len: int, k_len: int) -> np.ndarray:
    """Boolean ``[T, S]`` of disjoint tight slices; costs O(T * S + sum of slice heights)."""
    heights = slices[:, bands.Q_END] - slices[:, bands.Q_START]
    owner = np.repeat(np.arange(len(slices)), heights)
    first = np.cumsum(heights) - heights
    query = np.arange(len(owner)) - np.repeat(first - slices[:, bands.Q_START], heights)
    low, high = bands.key_bounds(slices[owner], query)
    # +1 where an interval begins and -1 where it ends, summed along keys.
    edges = np.zeros((q_len, k_len + 1), np.int8)
    np.add.at(edges, (query, low), 1)
    np.add.at(edges, (query, high), -1)
    return np.cumsum(edges[:, :k_len], axis=1, dtype=np.int8).astype(bool)


def row_counts(slices: np.ndarray, q_len: int) -> np.ndarray:
    """Visible keys of each query, int64 ``[T]``, in O(A + T)."""
    q0, q1, k0, k1, d0, d1 = slices.T
    last = q1 - 1
    jumps = np.zeros(q_len + 2, np.int64)  # of the count, from one query to the next
    bends = np.zeros(q_len + 2, np.int64)  # of its slope
    np.add.at(jumps, q0, np.minimum(k1, q0 + d1 + 1) - np.maximum(k0, q0 + d0))
    np.add.at(jumps, q1, np.maximum(k0, last + d0) - np.minimum(k1, last + d1 + 1))
    # The upper end climbs until it meets k1, the lower end climbs once it has left k0.
    climbs_until = np.clip(k1 - d1 - 1, q0, last)
    climbs_from = np.clip(k0 - d0, q0, last)
    np.add.at(bends, q0 + 1, 1)
    np.add.at(bends, climbs_until + 1, -1)
    np.add.at(bends, climbs_from + 1, -1)
    np.add.at(bends, q1, 1)
    return np.cumsum(jumps + np.cumsum(bends))[:q_len]


def to_mask_types(slices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts tight slices into pieces that have a `MaskType`: ``(q_ranges, k_ranges, types)``.

    The upper bound of a slice climbs and then stays, the lower bound stays and then climbs. Cutting
    where they turn leaves at most three pieces: CAUSAL, then FULL or BI_CAUSAL, then INV_CAUSAL.
    """
    q0, q1, k0, k1, d0, d1 = slices.T
    stays_from = k1 - d1 - 1  # the upper bound is at k1 in this row and after
    stays_until = k0 - d0  # the lower bound is at k0 in this row and before
    # The turning row itself belongs to either side; a piece of that row alone is avoided.
    upper_cut = np.where(stays_from <= q0, q0, np.minimum(stays_from + 1, q1))
    lower_cut = np.where(stays_until >= q1 - 1, q1, np.maximum(stays_until, q0))
    lower_cut = np.where((stays_until == stays_from) & (lower_cut < q1), upper_cut, lower_cut)
    first, second = np.minimum(upper_cut, lower_cut), np.maximum(upper_cut, lower_cut)

    cuts = np.stack([q0, first, second, q1], axis=1)
    middle = np.where(upper_cut > lower_cut, MaskType.BI_CAUSAL, MaskType.FULL)
    types = np.stack(
        [np.full_like(middle, MaskType.CAUSAL), middle, np.full_like(middle, MaskType.INV_CAUSAL)],
        axis=1,
    ).reshape(-1)
    pieces = bands.clip(
        np.repeat(slices, 3, axis=0), q_start=cuts[:, :3].reshape(-1), q_end=cuts[:, 1:].reshape(-1)
    )
    kept = bands.is_visible(pieces)
    pieces, types = pieces[kept], types[kept]
    q_ranges, k_ranges = pieces[:, : bands.K_START], pieces[:, bands.K_START : bands.D_MIN]
    cells = (q_ranges[:, 1] - q_ranges[:, 0]) * (k_ranges[:, 1] - k_ranges[:, 0])
    types = np.where(bands.area(pieces) == cells, MaskType.FULL, types).astype(np.int64)
    return q_ranges.copy(), k_ranges.copy(), types
