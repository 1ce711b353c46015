"""What each rank computes in each stage: slices in local coordinates."""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.dispatch import Layout
from magi_jax.solver.remote import QueryCut, Remote


class StageSlices(NamedTuple):
    """Slices of one stage in local coordinates: ``slices [B, 6]`` of ranks ``rank [B]``, rising."""

    slices: np.ndarray
    rank: np.ndarray


class _KeySegments(NamedTuple):
    """Stretches of keys that lie together in one buffer of one rank, sorted by (rank, begin)."""

    rank: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    stage: np.ndarray
    k_offset: np.ndarray


def stage_slices(
    cut: QueryCut, remote: Remote, layout: Layout, num_remote_stages: int
) -> list[StageSlices]:
    """Local slices of every stage: stage 0 reads the rank's own keys, stage ``i + 1`` remote stage
    ``i``.
    """
    segments = _key_segments(remote, layout)
    # Ranks are lifted onto one axis, so that one join serves all of them.
    span = layout.seq_len + 1
    source, segment = intervals.meet(
        cut.rank * span + cut.slices[:, bands.K_START],
        cut.rank * span + cut.slices[:, bands.K_END],
        segments.rank * span + segments.begin,
        segments.rank * span + segments.end,
    )
    pieces = bands.clip(
        cut.slices[source], k_start=segments.begin[segment], k_end=segments.end[segment]
    )
    pieces = bands.shift(pieces, cut.q_offset[source], segments.k_offset[segment])
    rank, stage = cut.rank[source], segments.stage[segment]
    seen = bands.is_visible(pieces)
    assert bands.area(pieces).sum() == bands.area(cut.slices).sum(), "a cell was lost or doubled"
    picks = [np.flatnonzero(seen & (stage == i)) for i in range(num_remote_stages + 1)]
    return [StageSlices(pieces[pick], rank[pick]) for pick in picks]


def _key_segments(remote: Remote, layout: Layout) -> _KeySegments:
    """Own segments and received ones; the latter merged where they abut, globally and so in the
    buffer.
    """
    first = np.ones(len(remote.dst), bool)
    first[1:] = (
        (np.diff(remote.dst) != 0)
        | (np.diff(remote.stage) != 0)
        | (remote.begin[1:] != remote.end[:-1])
    )
    last = np.roll(first, -1) if len(first) else first
    own_stage = np.zeros_like(layout.owner)
    rank = np.concatenate([layout.owner, remote.dst[first]])
    begin = np.concatenate([layout.edges[:-1], remote.begin[first]])
    end = np.concatenate([layout.edges[1:], remote.end[last]])
    stage = np.concatenate([own_stage, remote.stage[first] + 1])
    k_offset = np.concatenate([layout.offset, (remote.dst_row - remote.begin)[first]])
    order = np.lexsort((begin, rank))
    return _KeySegments(rank[order], begin[order], end[order], stage[order], k_offset[order])
