"""Rectangles that are one together.

Cut at the edges of segments, of ranks and of stages, a mask falls into more slices than it has to: parts that
lie apart in the sequence are neighbours in the rows of a rank, and a full rectangle, unlike a band, does not
care where in the sequence it lies. Fewer slices make shorter walks.
"""

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver.engine import compiled


def join_diagonals(slices: np.ndarray, engine: str = "numpy") -> np.ndarray:
    """Joins neighbours of one diagonal, such as documents of one token.

    Args:
        slices: tight visible slices ``[A, 6]``.
        engine: "numpy" or "compiled"; both join the same.

    Returns:
        tight slices of the same cells; ``slices`` itself where there is nothing to join.
    """
    if engine == "compiled":
        return compiled().join_diagonals(slices)
    is_one = slices[:, bands.D_MIN] == slices[:, bands.D_MAX]
    goes_on = is_one[1:] & is_one[:-1]
    goes_on &= np.diff(slices[:, bands.D_MIN]) == 0
    goes_on &= slices[1:, bands.Q_START] == slices[:-1, bands.Q_END]
    if not goes_on.any():
        return slices
    first = np.flatnonzero(np.append(True, ~goes_on))
    joined = slices[first]
    last = np.append(first[1:], len(slices)) - 1
    joined[:, [bands.Q_END, bands.K_END]] = slices[last][:, [bands.Q_END, bands.K_END]]
    return joined


def join_rectangles(slices: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Joins full rectangles of a group that abut in keys for the same queries, then those that abut in
    queries for the same keys.

    Args:
        slices: tight visible slices ``[A, 6]``; those of a group share no cell.
        group: group of each ``[A]``, such as a rank and a stage.

    Returns:
        slices and their groups, sorted by group, full rectangles first, by (k_start, k_end, q_start).
    """
    q0, q1, k0, k1, d0, d1 = slices.T
    full = (d0 == k0 - q1 + 1) & (d1 == k1 - 1 - q0)
    rectangles = slices[full], group[full]
    rectangles = _join(*rectangles, (bands.Q_START, bands.Q_END), (bands.K_END, bands.D_MAX))
    rectangles = _join(*rectangles, (bands.K_START, bands.K_END), (bands.Q_END, bands.D_MIN))
    slices = np.concatenate([rectangles[0], slices[~full]])
    group = np.concatenate([rectangles[1], group[~full]])
    is_band = np.arange(len(slices)) >= len(rectangles[0])
    columns = (bands.Q_START, bands.K_END, bands.K_START)
    order = np.lexsort((*(slices[:, column] for column in columns), is_band, group))
    return slices[order], group[order]


def _join(
    slices: np.ndarray, group: np.ndarray, same: tuple[int, int], last: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Joins rectangles of the ``same`` queries, or keys, where one ends at the other's begin; ``last`` are
    the columns that are those of the last of them: its end on the other axis, and a diagonal.
    """
    end = last[0]
    order = np.lexsort((slices[:, end], slices[:, same[1]], slices[:, same[0]], group))
    slices, group = slices[order], group[order]
    abuts = (np.diff(group) == 0) & (np.diff(slices[:, same], axis=0) == 0).all(axis=1)
    abuts &= slices[1:, end - 1] == slices[:-1, end]
    first = np.flatnonzero(np.append(True, ~abuts)[: len(slices)])
    ends = np.append(first[1:], len(slices))[: len(first)] - 1
    joined = slices[first]
    joined[:, last] = slices[ends][:, last]
    return joined, group[first]
