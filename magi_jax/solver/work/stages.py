"""What each rank computes in each stage: slices in local coordinates."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.dispatch.layout import Layout
from magi_jax.solver.engine import compiled
from magi_jax.solver.work import two_level
from magi_jax.solver.work.join import join_rectangles
from magi_jax.solver.work.remote import QueryCut, Remote, split_stages


class StageSlices(NamedTuple):
    """Slices of one stage in local coordinates: ``slices [B, 6]`` of ranks ``rank [B]``, rising."""

    slices: np.ndarray
    rank: np.ndarray


class Staged(NamedTuple):
    """Remote ranges cut into stages, and what each rank computes in each stage.

    Attributes:
        remote: what travels in each remote stage.
        slices: local slices of stage 0 and of all remote stages.
        near: whether each remote stage has rows of own nodes alone; empty where stages have rows of all.
    """

    remote: Remote
    slices: list[StageSlices]
    near: tuple[bool, ...] = ()

    @property
    def num_remote_stages(self) -> int:
        """Stages whose keys come from other ranks."""
        return len(self.slices) - 1


def cut_stages(
    cut: QueryCut,
    remote: Remote,
    layout: Layout,
    num_remote_stages: int,
    turned: bool = False,
    engine: str = "numpy",
    ranks_per_node: int | None = None,
    cutter: Any = None,
    near: tuple[bool, ...] = (),
) -> Staged:
    """`split_stages`, then `stage_slices`.

    Args:
        cut: slices by owner.
        remote: ranges that travel, all in one stage.
        layout: who owns which tokens.
        num_remote_stages: stages of equal size to cut them into; 0 when there is one rank only.
        turned: see `split_stages`.
        engine: "numpy" or "compiled"; both find the same.
        ranks_per_node: cuts the rows of nodes of so many ranks instead: `two_level.split_stages`.
        cutter: the `stage_cutter` of all this, where there is one already.
        near: stages of own nodes and others, which come between nodes: `two_level.split_by_node`.
    """
    if engine == "compiled":
        cutter = cutter or stage_cutter(cut, remote, layout, ranks_per_node)
        two_steps = ranks_per_node is not None
        ranges, slices, group = cutter.cut(num_remote_stages, turned, two_steps, near)
        by_stage = _by_stage(slices, group, layout.cp_size, num_remote_stages)
        return Staged(Remote(*ranges.T), by_stage, near)
    sizes = num_remote_stages, layout.cp_size
    if near:
        assert ranks_per_node is not None, "there are no nodes"
        remote = two_level.split_by_node(remote, near, layout.cp_size, ranks_per_node)
    elif num_remote_stages > 1 and ranks_per_node is not None:
        remote = two_level.split_stages(remote, *sizes, ranks_per_node, turned)
    elif num_remote_stages > 1:
        remote = split_stages(remote, *sizes, turned)
    return Staged(remote, stage_slices(cut, remote, layout, num_remote_stages), near)


def stage_cutter(
    cut: QueryCut, remote: Remote, layout: Layout, ranks_per_node: int | None = None
) -> Any:
    """The compiled planner's ``StageCutter``, which cuts stages and predicts their times."""
    return compiled().StageCutter(
        *cut, np.stack(remote, axis=1), layout.edges, layout.owner, layout.offset, layout.cp_size,
        ranks_per_node or layout.cp_size,
    )  # fmt: skip


def _by_stage(slices, group, cp_size: int, num_remote_stages: int) -> list[StageSlices]:
    first = np.searchsorted(group, np.arange(num_remote_stages + 2) * cp_size)
    return [StageSlices(slices[a:b], group[a:b] % cp_size) for a, b in itertools.pairwise(first)]


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
    ``i``. ``layout`` is that of the keys.
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
    seen = np.flatnonzero(bands.is_visible(pieces))
    group = segments.stage[segment][seen] * layout.cp_size + cut.rank[source][seen]
    pieces, group = join_rectangles(pieces[seen], group)
    assert bands.area(pieces).sum() == bands.area(cut.slices).sum(), "a cell was lost or doubled"
    return _by_stage(pieces, group, layout.cp_size, num_remote_stages)


def whole_key_slices(cut: QueryCut) -> StageSlices:
    """Local slices of each rank where all of them hold all keys."""
    return StageSlices(*join_rectangles(bands.shift(cut.slices, cut.q_offset, 0), cut.rank))


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
