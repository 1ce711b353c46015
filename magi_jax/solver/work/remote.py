"""Which keys each rank needs, where they come from, and in which stage they travel."""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.dispatch.layout import Layout
from magi_jax.solver.engine import compiled


class QueryCut(NamedTuple):
    """Slices cut at the query segments of a layout, sorted by rank.

    Attributes:
        slices: tight visible slices ``[B, 6]`` in global coordinates.
        rank: owner of the queries ``[B]``, rising.
        q_offset: ``[B]`` what takes a global query to its local row.
    """

    slices: np.ndarray
    rank: np.ndarray
    q_offset: np.ndarray


class Remote(NamedTuple):
    """Key ranges that travel, sorted by (dst, begin); each row of a rank appears once.

    Attributes:
        dst: receiving rank ``[E]``.
        src: owner ``[E]``.
        begin, end: global range ``[E]``, inside one segment of the layout.
        src_row: first row at the owner ``[E]``.
        stage: remote stage, from 0 ``[E]``.
        dst_row: first row in the buffer of its stage ``[E]``.
    """

    dst: np.ndarray
    src: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    src_row: np.ndarray
    stage: np.ndarray
    dst_row: np.ndarray


NOTHING_REMOTE = Remote(*np.zeros((7, 0), np.int64))


def find_remote(
    slices: np.ndarray, layout: Layout, keys: Layout | None, engine: str = "numpy"
) -> tuple[QueryCut, Remote]:
    """`cut_queries`, then `remote_ranges`.

    Args:
        slices: tight visible slices ``[A, 6]``.
        layout: who owns which queries.
        keys: who owns which keys; None where every rank has all of them.
        engine: "numpy" or "compiled"; both find the same.
    """
    if keys is None:
        return cut_queries(slices, layout), NOTHING_REMOTE
    if engine == "numpy":
        cut = cut_queries(slices, layout)
        return cut, remote_ranges(cut, keys)
    *cut, remote = compiled().find_remote(
        slices, layout.edges, layout.owner, layout.offset, keys.edges, keys.owner, keys.offset,
        layout.cp_size,
    )  # fmt: skip
    return QueryCut(*cut), Remote(*remote.T)


def cut_queries(slices: np.ndarray, layout: Layout) -> QueryCut:
    """Cuts tight visible slices ``[A, 6]`` at the layout's segments, sorted by owner."""
    source, segment = intervals.meet(
        slices[:, bands.Q_START], slices[:, bands.Q_END], layout.edges[:-1], layout.edges[1:]
    )
    rank = layout.owner[segment]
    order = np.argsort(rank, kind="stable")
    source, segment = source[order], segment[order]
    cut = bands.clip(slices[source], q_start=layout.edges[segment], q_end=layout.edges[segment + 1])
    seen = bands.is_visible(cut)
    return QueryCut(cut[seen], rank[order][seen], layout.offset[segment][seen])


def remote_ranges(cut: QueryCut, layout: Layout, with_own: bool = False) -> Remote:
    """Exactly the distinct keys that each rank sees and does not own, all in stage 0; ``layout`` is
    that of the keys. ``with_own`` lists those that it owns too, as if it sent them to itself.

    The visible keys of a tight slice have no holes, so the union of key ranges is the set of keys
    read.
    """
    rank, begin, end = intervals.union(
        cut.rank, cut.slices[:, bands.K_START], cut.slices[:, bands.K_END]
    )
    source, segment = intervals.meet(begin, end, layout.edges[:-1], layout.edges[1:])
    far = with_own | (layout.owner[segment] != rank[source])
    source, segment = source[far], segment[far]
    begin = np.maximum(begin[source], layout.edges[segment])
    end = np.minimum(end[source], layout.edges[segment + 1])
    dst = rank[source]
    return Remote(
        dst=dst,
        src=layout.owner[segment],
        begin=begin,
        end=end,
        src_row=begin + layout.offset[segment],
        stage=np.zeros_like(dst),
        dst_row=intervals.offsets(dst, end - begin, layout.cp_size),
    )


def split_stages(remote: Remote, num_stages: int, cp_size: int, turned: bool = False) -> Remote:
    """Cuts each rank's rows into ``num_stages`` stages of nearly equal size; a buffer is in global order.

    Turned stages go round the sequence from a place of the rank's own: where all ranks need all keys,
    each rank then sends to some in every stage, instead of to all of them in one.
    """
    size = remote.end - remote.begin
    rows = np.bincount(remote.dst, weights=size, minlength=cp_size).astype(np.int64)[:, None]
    start = rows * np.arange(cp_size)[:, None] // cp_size
    if not turned:
        start = np.zeros_like(start)
    steps = rows * np.arange(num_stages + 1) // num_stages  # of stages, from `start` on
    inner = (start + steps[:, :-1]) % np.maximum(rows, 1)
    edges = np.sort(np.concatenate([np.zeros_like(rows), inner], axis=1), axis=1)
    from_start = (edges - start) % np.maximum(rows, 1)
    stage = (steps[:, None, :] <= from_start[:, :, None]).sum(axis=2) - 1
    stage = np.minimum(stage, num_stages - 1)  # of ranks without rows
    # The last part of a stage that goes past the end lies at the front of its buffer.
    beyond = start + np.take_along_axis(steps, stage + 1, axis=1) - rows
    offset = np.where((beyond > 0) & (edges >= start), beyond, 0)

    # All ranks' rows on one axis, cut into cells.
    rank_base = np.cumsum(rows) - rows[:, 0]
    cells = np.append((rank_base[:, None] + edges).ravel(), rows.sum())
    full = np.flatnonzero(np.diff(cells) > 0)
    begin = remote.dst_row + rank_base[remote.dst]
    source, cell = intervals.meet(begin, begin + size, cells[full], cells[full + 1])
    cell = full[cell]
    low = np.maximum(begin[source], cells[cell])
    high = np.minimum((begin + size)[source], cells[cell + 1])
    skipped = low - begin[source]
    return Remote(
        dst=remote.dst[source],
        src=remote.src[source],
        begin=remote.begin[source] + skipped,
        end=remote.begin[source] + skipped + high - low,
        src_row=remote.src_row[source] + skipped,
        stage=stage.ravel()[cell],
        dst_row=low - cells[cell] + offset.ravel()[cell],
    )
