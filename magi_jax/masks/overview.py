"""Masks of any length at a glance: how much of each block is visible, as numbers and as text."""

import numpy as np

from magi_jax.masks import bands

_PAIRS_AT_ONCE = 1 << 19


def coverage(slices: np.ndarray, q_len: int, k_len: int, rows: int, columns: int) -> np.ndarray:
    """Visible share of each block of ``rows`` x ``columns`` that divide disjoint slices evenly.

    Returns:
        float64 ``[rows, columns]``; 0 in blocks without a cell.
    """
    q_edges, k_edges = _edges(q_len, rows), _edges(k_len, columns)
    counts = np.zeros((rows, columns), np.int64)
    row, row_count = _touched(slices[:, bands.Q_START], slices[:, bands.Q_END], q_edges)
    column, column_count = _touched(slices[:, bands.K_START], slices[:, bands.K_END], k_edges)
    # Pairs of a slice and a block that it may meet, so many at a time that they fit in memory.
    end = np.cumsum(row_count * column_count)
    for first in range(0, int(end[-1]) if len(end) else 0, _PAIRS_AT_ONCE):
        pair = np.arange(first, min(first + _PAIRS_AT_ONCE, end[-1]))
        owner = np.searchsorted(end, pair, side="right")
        place = pair - end[owner] + row_count[owner] * column_count[owner]
        i, j = divmod(place, column_count[owner])
        i, j = i + row[owner], j + column[owner]
        cut = bands.clip(
            slices[owner],
            q_start=q_edges[i],
            q_end=q_edges[i + 1],
            k_start=k_edges[j],
            k_end=k_edges[j + 1],
        )
        np.add.at(counts, (i, j), bands.area(cut))
    return counts / np.maximum(np.outer(np.diff(q_edges), np.diff(k_edges)), 1)


def sketch(shares: np.ndarray) -> str:
    """Two characters for each block, since letters are twice as high as wide: ``##`` is visible as a
    whole, ``++`` in part, ``..`` not at all.
    """
    texts = np.where(shares >= 1, "##", np.where(shares > 0, "++", ".."))
    return "\n".join("".join(row) for row in texts.tolist())


def _edges(length: int, parts: int) -> np.ndarray:
    return np.arange(parts + 1, dtype=np.int64) * length // parts


def _touched(
    start: np.ndarray, end: np.ndarray, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The first part that each non-empty interval meets, and how many parts there are to its last one."""
    first = np.searchsorted(edges, start, side="right") - 1
    return first, np.searchsorted(edges, end, side="left") - first
