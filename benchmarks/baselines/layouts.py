"""Which rank holds which tokens, as the layouts of the planner."""

import numpy as np

from magi_jax.solver import intervals
from magi_jax.solver.dispatch import Assignment, Layout, make_layout


def contiguous(seq_len: int, num_ranks: int) -> Layout:
    """Rank ``r`` holds the ``r``-th of equal runs."""
    edges = np.arange(num_ranks + 1) * seq_len // num_ranks
    return make_layout(Assignment(edges, np.arange(num_ranks)), num_ranks)


def zigzag(seq_len: int, num_ranks: int) -> Layout:
    """Rank ``r`` holds the ``r``-th half run from the front and the ``r``-th from the back."""
    return zigzag_documents(np.array([seq_len]), num_ranks)


def zigzag_documents(lengths: np.ndarray, num_ranks: int) -> Layout:
    """Every document is cut as `zigzag` cuts a sequence, as Transformer Engine does with packed ones."""
    parts = 2 * num_ranks
    start = np.cumsum(lengths) - lengths
    edges = start[:, None] + np.asarray(lengths)[:, None] * np.arange(parts) // parts
    ranks = np.arange(num_ranks)
    owner = np.tile(np.concatenate([ranks, ranks[::-1]]), len(lengths))
    return make_layout(Assignment(np.append(edges.ravel(), np.sum(lengths)), owner), num_ranks)


def split_evenly(layout: Layout, parts: int) -> Layout:
    """Rank ``r`` of ``layout`` becomes ranks ``r * parts ..``, which hold equal runs of its rows."""
    if parts == 1:
        return layout
    held = rows_held(layout)
    size = np.diff(layout.edges)
    cuts = held[:, None] * np.arange(parts) // parts  # first row of each new rank, at the old one
    base = np.cumsum(held) - held
    row = base[layout.owner] + layout.local_start
    order = np.argsort(row)
    bounds = np.append((base[:, None] + cuts).ravel(), held.sum())
    # A part without rows has equal bounds and meets nothing.
    full = np.flatnonzero(np.diff(bounds))
    source, part = intervals.meet(
        row[order], (row + size)[order], bounds[:-1][full], bounds[1:][full]
    )
    part, segment = full[part], order[source]
    begin = np.maximum(row[segment], bounds[part])
    start = layout.edges[segment] + begin - row[segment]
    by_start = np.argsort(start)
    edges = np.append(start[by_start], layout.seq_len)
    return make_layout(Assignment(edges, part[by_start]), layout.cp_size * parts)


def grouped(layout: Layout, parts: int) -> Layout:
    """``parts`` neighbouring ranks as one, whose buffer is theirs one after the other, padding included."""
    owner, most = layout.owner // parts, rows_held(layout).max()
    row = layout.owner % parts * most + layout.local_start
    offset = row - layout.edges[:-1]
    first = np.flatnonzero(
        (np.diff(owner, prepend=-1) != 0) | (np.diff(offset, prepend=offset[:1]) != 0)
    )
    edges = np.append(layout.edges[first], layout.seq_len)
    return Layout(edges, owner[first], row[first], layout.cp_size // parts)


def rows_held(layout: Layout) -> np.ndarray:
    """Rows of each rank, ``[ranks]``."""
    size = np.diff(layout.edges)
    return np.bincount(layout.owner, size, layout.cp_size).astype(np.int64)


def positions(layout: Layout) -> np.ndarray:
    """Global position of each local row, -1 = padding, ``[ranks, most rows]``."""
    result = np.full((layout.cp_size, rows_held(layout).max()), -1)
    for begin, end, rank, row in zip(
        layout.edges[:-1], layout.edges[1:], layout.owner, layout.local_start, strict=True
    ):
        result[rank, row : row + end - begin] = np.arange(begin, end)
    return result


def shard(x: np.ndarray, layout: Layout) -> np.ndarray:
    """Rows of each rank one rank after the other, zeros in padding, ``[ranks * most rows, ...]``."""
    index = positions(layout).ravel()
    rows = np.asarray(x)[np.maximum(index, 0)]
    return np.where((index >= 0).reshape(-1, *(1,) * (x.ndim - 1)), rows, 0).astype(x.dtype)


def unshard(x: np.ndarray, layout: Layout) -> np.ndarray:
    """The inverse of `shard`."""
    index = positions(layout).ravel()
    result = np.zeros((layout.seq_len, *x.shape[1:]), x.dtype)
    result[index[index >= 0]] = np.asarray(x)[index >= 0]
    return result


def inverse(index: np.ndarray, length: int) -> np.ndarray:
    """Where each of ``length`` rows is in the index of its rank, -1 where it is not, ``[ranks, length]``."""
    found = np.full((len(index), length), -1, np.int32)
    rank, at = np.nonzero(index >= 0)
    found[rank, index[rank, at]] = at
    return found
