"""Masks of any length at a glance: how much of each block is visible, as numbers and as text."""

import itertools

import numpy as np

from magi_jax.masks import bands


def coverage(slices: np.ndarray, q_len: int, k_len: int, rows: int, columns: int) -> np.ndarray:
    """Visible share of each block of ``rows`` x ``columns`` that divide disjoint slices evenly.

    Returns:
        float64 ``[rows, columns]``; 0 in blocks without a cell.
    """
    q_edges, k_edges = _edges(q_len, rows), _edges(k_len, columns)
    counts = np.zeros((rows, columns), np.int64)
    for row, (start, end) in enumerate(itertools.pairwise(q_edges)):
        inside = bands.clip(slices, q_start=start, q_end=end)
        inside = inside[bands.is_visible(inside)]
        parts = bands.clip(
            np.repeat(inside, columns, axis=0),
            k_start=np.tile(k_edges[:-1], len(inside)),
            k_end=np.tile(k_edges[1:], len(inside)),
        )
        counts[row] = bands.area(parts).reshape(-1, columns).sum(axis=0)
    return counts / np.maximum(np.outer(np.diff(q_edges), np.diff(k_edges)), 1)


def sketch(shares: np.ndarray) -> str:
    """Two characters for each block, since letters are twice as high as wide: ``##`` is visible as a
    whole, ``++`` in part, ``..`` not at all.
    """
    texts = np.where(shares >= 1, "##", np.where(shares > 0, "++", ".."))
    return "\n".join("".join(row) for row in texts.tolist())


def _edges(length: int, parts: int) -> np.ndarray:
    return np.arange(parts + 1, dtype=np.int64) * length // parts
