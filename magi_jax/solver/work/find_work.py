"""What ranks exchange and compute under one layout of tokens, before stages are chosen."""

from typing import Any, NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver.dispatch.layout import Layout
from magi_jax.solver.work.remote import QueryCut, Remote, find_remote
from magi_jax.solver.work.stages import (
    Staged,
    StageSlices,
    cut_stages,
    stage_cutter,
    whole_key_slices,
)


class Travel(NamedTuple):
    """Queries that go to the owners of the keys they see, instead of keys coming to them.

    Attributes:
        moved: query rows that travel: ``begin, end`` is a range of queries that ``src`` owns and that
            see keys of ``dst``.
        away: what rank ``dst`` computes: queries are rows of its buffer, keys its own rows.
        home: what these queries see at their owners, in local coordinates; part of stage 0.
    """

    moved: Remote
    away: StageSlices
    home: StageSlices


class Keys(NamedTuple):
    """Where keys are.

    Attributes:
        layout: who owns which; None where all of them are on every rank.
        local_len: rows of each rank.
    """

    layout: Layout | None
    local_len: int


class Work(NamedTuple):
    """All that one layout asks for.

    Attributes:
        layout: who owns which queries.
        keys: where keys are: with the queries in self-attention.
        cut: slices of the queries whose keys come to them, by owner.
        far: keys that come, in one stage.
        travel: the other queries; None when none travel.
        engine: what stages are cut with.
    """

    layout: Layout
    keys: Keys
    cut: QueryCut
    far: Remote
    travel: Travel | None
    engine: str

    @property
    def moves_keys(self) -> bool:
        """Whether any key comes from another rank."""
        return len(self.far.dst) > 0

    def staged(
        self,
        num_remote_stages: int,
        turned: bool = False,
        ranks_per_node: int | None = None,
        cutter: Any = None,
        near: tuple[bool, ...] = (),
    ) -> Staged:
        """The work in so many remote stages of equal size; other arguments as in `cut_stages`."""
        if self.keys.layout is None:
            return Staged(self.far, [whole_key_slices(self.cut)])
        kind = num_remote_stages, turned, self.engine, ranks_per_node, cutter, near
        found = cut_stages(self.cut, self.far, self.keys.layout, *kind)
        if self.travel is None:
            return found
        local, home = found.slices[0], self.travel.home
        rank = np.concatenate([local.rank, home.rank])
        order = np.argsort(rank, kind="stable")
        slices = np.concatenate([local.slices, home.slices])[order]
        return found._replace(slices=[StageSlices(slices, rank[order]), *found.slices[1:]])

    def cutter(self, ranks_per_node: int) -> Any:
        """See `stages.stage_cutter`; travelling queries are not part of it."""
        assert self.keys.layout is not None, "there are no stages where all ranks have all keys"
        return stage_cutter(self.cut, self.far, self.keys.layout, ranks_per_node)

    def home_slices(self) -> tuple[np.ndarray, np.ndarray]:
        """What travelling queries see at home: slices ``[A, 6]`` and their ranks ``[A]``."""
        if self.travel is None:
            return np.zeros((0, bands.NUM_COLUMNS), np.int64), np.zeros(0, np.int64)
        return self.travel.home.slices, self.travel.home.rank


def find_work(
    slices: np.ndarray,
    travelling: np.ndarray,
    layout: Layout,
    keys: Keys,
    engine: str = "numpy",
) -> Work:
    """Solves what crosses ranks, all in one stage.

    Args:
        slices: tight visible slices ``[A, 6]`` of queries whose keys come to them.
        travelling: those of queries that travel, ``[B, 6]``; none where every rank has all keys.
        layout: who owns which queries.
        keys: where keys are.
        engine: "numpy" or "compiled"; both find the same.
    """
    cut, far = find_remote(slices, layout, keys.layout, engine)
    travel = None
    if len(travelling):
        assert keys.layout is not None, "nobody travels to keys that are everywhere"
        travel = _find_travel(travelling, layout, keys.layout, engine)
    return Work(layout, keys, cut, far, travel, engine)


def _find_travel(travelling: np.ndarray, layout: Layout, keys: Layout, engine: str) -> Travel:
    """The same problem with queries and keys changed over: owners of keys receive queries."""
    cut, moved = find_remote(bands.transpose(travelling), keys, layout, engine)
    home, away = (
        StageSlices(bands.transpose(stage.slices), stage.rank)
        for stage in cut_stages(cut, moved, layout, 1, engine=engine).slices
    )
    return Travel(moved, away, home)


def traffic(remote: Remote, num_stages: int, cp_size: int) -> np.ndarray:
    """Rows of each stage from source to destination, int64 ``[S, cp, cp]``."""
    pair = (remote.stage * cp_size + remote.src) * cp_size + remote.dst
    rows = np.bincount(pair, remote.end - remote.begin, num_stages * cp_size * cp_size)
    return rows.reshape(num_stages, cp_size, cp_size).astype(np.int64)
