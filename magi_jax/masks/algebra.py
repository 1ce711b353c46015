"""Intersection, union, difference and merging of sets of slices, vectorised."""

from typing import Literal

import numpy as np

from magi_jax.masks import bands


def intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Tight visible slices of the cells in both ``a [A, 6]`` and ``b [B, 6]``."""
    index_a, index_b = touching_pairs(a, b)
    common = bands.intersect(a[index_a], b[index_b])
    return common[bands.is_visible(common)]


def union(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Disjoint slices of the cells in either; each of ``a`` and ``b`` is disjoint in itself."""
    # Cutting the many by the few leaves fewer pieces and takes fewer rounds.
    few, many = (a, b) if len(a) <= len(b) else (b, a)
    return merge(np.concatenate([few, difference(many, few)]))


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Disjoint slices of the cells of ``a`` that are not in ``b``; ``a`` is disjoint in itself.

    Each piece meets the cutters of the slice that it came from in the order of their first query; a
    piece that ends before its next cutter begins is finished. One round handles one cutter per
    piece.
    """
    owner, cutter = touching_pairs(a, b)
    order = np.lexsort((b[cutter, bands.Q_START], owner))
    cutters = b[cutter[order]]
    bounds = np.searchsorted(owner[order], np.arange(len(a) + 1))
    pieces, at, end = a, bounds[:-1], bounds[1:]
    finished = [a[:0]]
    while len(pieces):
        done = at == end
        done[~done] = cutters[at[~done], bands.Q_START] >= pieces[~done, bands.Q_END]
        finished.append(pieces[done])
        pieces, at, end = pieces[~done], at[~done], end[~done]
        parts = bands.subtract(pieces, cutters[at])
        kept, part = np.nonzero(
            bands.is_visible(parts.reshape(-1, bands.NUM_COLUMNS)).reshape(-1, 6)
        )
        pieces, at, end = parts[kept, part], at[kept] + 1, end[kept]
    return np.concatenate(finished)


def merge(slices: np.ndarray) -> np.ndarray:
    """Joins neighbours of disjoint tight slices whose union is one slice, as sorting finds them."""
    orders = (
        (bands.Q_START, bands.Q_END, bands.K_START),
        (bands.K_START, bands.K_END, bands.Q_START),
        (bands.Q_START, bands.K_START),
        (bands.K_START, bands.Q_START),
        (bands.D_MIN, bands.D_MAX, bands.Q_START),
    )
    before = None
    while before != len(slices):
        before = len(slices)
        for keys in orders:
            slices = _merge_neighbours(slices[np.lexsort([slices[:, key] for key in keys[::-1]])])
    return slices


def touching_pairs(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index pairs that include all with a common cell.

    They overlap in one of queries, keys and diagonals, whichever leaves the fewest pairs.
    """
    choices = []
    for start, end, closed in (
        (bands.Q_START, bands.Q_END, 0),
        (bands.K_START, bands.K_END, 0),
        (bands.D_MIN, bands.D_MAX, 1),
    ):
        in_a = _starts_inside(a[:, start], a[:, end] + closed, b[:, start], "left")
        in_b = _starts_inside(b[:, start], b[:, end] + closed, a[:, start], "right")
        choices.append((in_a, in_b))
    in_a, in_b = min(choices, key=lambda runs: runs[0][2].sum() + runs[1][2].sum())
    a_first, b_second = _expand(*in_a)
    b_first, a_second = _expand(*in_b)
    return np.concatenate([a_first, a_second]), np.concatenate([b_second, b_first])


def _starts_inside(
    start: np.ndarray, end: np.ndarray, other_start: np.ndarray, side: Literal["left", "right"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The others that begin inside each interval: their sort order, first position and number.

    With ``side="right"`` those that begin together with it are left out, so that swapping the roles
    does not give a pair twice.
    """
    order = np.argsort(other_start, kind="stable")
    first = np.searchsorted(other_start[order], start, side)
    last = np.searchsorted(other_start[order], end, "left")
    return order, first, np.maximum(last - first, 0)


def _expand(
    order: np.ndarray, first: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    owner = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return owner, order[first[owner] + within]


def _merge_neighbours(slices: np.ndarray) -> np.ndarray:
    """One pass over rows in a given order, joining disjoint pairs of consecutive rows."""
    if len(slices) < 2:
        return slices
    a, b = slices[:-1], slices[1:]
    lowest, highest = np.minimum(a, b), np.maximum(a, b)
    hull = highest.copy()
    low_columns = [bands.Q_START, bands.K_START, bands.D_MIN]
    hull[:, low_columns] = lowest[:, low_columns]
    hull = bands.tighten(hull)
    # The smallest slice around both has no cell of its own: the union is that slice.
    joins = bands.area(hull) == bands.area(a) + bands.area(b)
    position = np.arange(len(joins))
    since_gap = position - np.maximum.accumulate(np.where(joins, -1, position))
    chosen = np.flatnonzero(joins & (since_gap % 2 == 1))
    out = slices.copy()
    out[chosen] = hull[chosen]
    return np.delete(out, chosen + 1, axis=0)
