"""Context parallelism sized by document: long documents over many ranks, short ones on one.

The idea of hybrid or dynamic context parallelism (ByteScale, arXiv 2502.21231; FlexSP, arXiv 2412.01523;
Megatron Core's hybrid context parallel): a group of 1, 2, 4, ... ranks for each document, as large as its
tokens and its area ask for, or a few times as large where that balances ranks better, which FlexSP finds with
a solver. Groups are aligned, so that those of one size are the groups of one collective.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baselines import collectives, layouts, tables
from baselines.base import Problem, Strategy
from magi_jax.masks import bands
from magi_jax.ops import flex_flash_attention
from magi_jax.plan.tables import SliceTable
from magi_jax.solver import intervals
from magi_jax.solver.dispatch import Assignment, Layout, make_layout


class Placement(NamedTuple):
    """Size and first rank of the group of each document, ``[D]`` both."""

    size: np.ndarray
    first: np.ndarray


def place(
    lengths: np.ndarray,
    area: np.ndarray,
    num_ranks: int,
    spread: int = 1,
    most_tokens: float = 1.5,
) -> Placement:
    """Chooses groups: the smallest that hold a document, then heaviest first to the least loaded group.

    A document for which no group has room takes a larger one.

    Args:
        lengths: tokens of each document ``[D]``.
        area: visible pairs of each document ``[D]``.
        num_ranks: a power of two.
        spread: groups have room for so many times the area of a document.
        most_tokens: rows of a rank over the mean; more of them let ranks be balanced better.
    """
    if num_ranks & (num_ranks - 1):
        raise ValueError(f"num_ranks must be a power of two, got {num_ranks}")
    tokens, work = lengths.sum() / num_ranks, max(area.sum() / num_ranks, 1)
    need = np.maximum(np.maximum(lengths / tokens, spread * area / work), 1.0)
    size = np.minimum(1 << np.ceil(np.log2(need)).astype(int), num_ranks)
    held, load = np.zeros(num_ranks), np.zeros(num_ranks)
    first = np.zeros(len(lengths), np.int64)
    for document in np.lexsort((-area, -size)):
        group = size[document]
        most = most_tokens * tokens - lengths[document] / group
        while (fullest := held.reshape(-1, group).max(axis=1)).min() > most and group < num_ranks:
            group = size[document] = 2 * group
            most = most_tokens * tokens - lengths[document] / group
        rows, cost = lengths[document] / group, area[document] / group
        room, score = fullest <= most, load.reshape(-1, group).max(axis=1)
        if not room.any():
            room, score = np.ones_like(room), fullest
        chosen = np.flatnonzero(room)[np.argmin(score[room])] * group
        first[document] = chosen
        held[chosen : chosen + group] += rows
        load[chosen : chosen + group] += cost
    return Placement(size, first)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Level:
    """Documents of one group size: what a rank needs of it.

    Attributes:
        rows: local row of each row of the level, -1 = padding, ``[ranks, most rows]``.
        place: the inverse: row of the level of each local row, -1 = of another level, ``[ranks, T]``.
        key_order: where each key, document after document, lies among the gathered ones, -1 = padding,
            ``[ranks, most keys]``.
        key_place: the inverse, ``[ranks, gathered rows]``.
        table: kernel table, queries in rows of the level, keys in ``key_order``.
        size: static; ranks of a group.
    """

    rows: Any
    place: Any
    key_order: Any
    key_place: Any
    table: SliceTable
    size: int = field(metadata={"static": True})


@dataclass(frozen=True)
class Hybrid(Strategy):
    """Inside each group the keys of its documents are gathered and queries lie in zigzag.

    Attributes:
        spread, most_tokens: see `place`.
    """

    spread: int = 1
    most_tokens: float = 1.5

    def place(self, problem: Problem) -> Placement:
        """The group of each document."""
        area = _document_area(problem)
        return place(problem.lengths, area, self.num_ranks, self.spread, self.most_tokens)

    def layout(self, problem: Problem) -> Layout:
        """See `Strategy.layout`."""
        edges, owner = [], []
        placement = self.place(problem)
        start = np.cumsum(problem.lengths) - problem.lengths
        for begin, length, size, first in zip(start, problem.lengths, *placement, strict=True):
            parts = 2 * size if size > 1 else 1
            ranks = np.arange(size)
            edges.append(begin + length * np.arange(parts) // parts)
            owner.append(first + np.concatenate([ranks, ranks[::-1]])[:parts])
        edges.append(np.array([problem.mask.q_len]))
        assignment = Assignment(np.concatenate(edges), np.concatenate(owner))
        return make_layout(assignment, self.num_ranks)

    def tables(self, problem: Problem) -> list[Level]:
        """The levels that have documents, smallest groups first, leaves ``[ranks, ...]``."""
        placement = self.place(problem)
        position = layouts.positions(self.layout(problem))
        document = np.repeat(np.arange(len(problem.lengths)), problem.lengths)
        size_of_row = np.where(position >= 0, placement.size[document[position]], 0)
        levels = []
        for size in np.unique(placement.size):
            chosen = size_of_row == size
            rows = _pad([np.flatnonzero(row) for row in chosen])
            at = [position[rank][chosen[rank]] for rank in range(self.num_ranks)]
            keys = _pad([_key_order(at, rank, int(size), rows.shape[1]) for rank in range(len(at))])
            cells = _cells(problem, placement, int(size), at)
            table = tables.table(cells, self.num_ranks, rows.shape[1], keys.shape[1])
            place, key_place = (
                layouts.inverse(rows, position.shape[1]),
                layouts.inverse(keys, int(size) * rows.shape[1]),
            )
            levels.append(Level(rows, place, keys, key_place, table, int(size)))
        return levels

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        """See `Strategy.attend`."""
        ((axis, ranks),) = self.axes
        outs = []
        for level in tables:
            groups = np.arange(ranks).reshape(-1, level.size).tolist()
            keys_values = []
            for x in (k, v):
                mine = collectives.rearrange(x, level.rows, level.place)
                if level.size > 1:
                    mine = jax.lax.all_gather(mine, axis, axis_index_groups=groups, tiled=True)
                keys_values.append(collectives.rearrange(mine, level.key_order, level.key_place))
            mine = collectives.rearrange(q, level.rows, level.place)
            here = flex_flash_attention(mine, *keys_values, level.table)
            outs.append(collectives.rearrange(here, level.place, level.rows))
        return functools.reduce(jnp.add, outs)  # a row is of one level, the others have zeros


def _document_area(problem: Problem) -> np.ndarray:
    """Visible pairs of each document; ValueError where a slice joins two of them."""
    edges = np.concatenate([[0], np.cumsum(problem.lengths)])
    slices = problem.mask.slices
    document = np.searchsorted(edges, slices[:, bands.Q_START], side="right") - 1
    inside = (slices[:, [bands.Q_END, bands.K_END]] <= edges[document + 1, None]).all(axis=1)
    if not (inside & (slices[:, bands.K_START] >= edges[document])).all():
        raise ValueError("hybrid needs documents that do not see each other")
    return np.bincount(document, bands.area(slices), len(problem.lengths))


def _cells(problem: Problem, placement: Placement, size: int, at: list[np.ndarray]) -> tables.Cells:
    """Slices of each rank for the documents of one size; ``at`` has the positions of its rows."""
    edges = np.concatenate([[0], np.cumsum(problem.lengths)])
    slices = problem.mask.slices
    document = np.searchsorted(edges, slices[:, bands.Q_START], side="right") - 1
    mine = placement.size[document] == size
    slices, document = slices[mine], document[mine]
    key_row = np.zeros(len(problem.lengths), np.int64)
    for first in np.unique(placement.first[placement.size == size]):
        group = np.flatnonzero((placement.size == size) & (placement.first == first))
        key_row[group] = np.cumsum(problem.lengths[group]) - problem.lengths[group]

    firsts = [np.flatnonzero(np.diff(p, prepend=-2) != 1) for p in at]
    begin = np.concatenate([p[f] for p, f in zip(at, firsts, strict=True)])
    rows = np.concatenate([np.diff(np.append(f, len(p))) for p, f in zip(at, firsts, strict=True)])
    rank = np.repeat(np.arange(len(at)), [len(f) for f in firsts])
    local = np.concatenate(firsts)
    order = np.argsort(begin)
    begin, rows, rank, local = begin[order], rows[order], rank[order], local[order]
    source, run = intervals.meet(
        slices[:, bands.Q_START], slices[:, bands.Q_END], begin, begin + rows
    )
    cut = bands.clip(slices[source], q_start=begin[run], q_end=(begin + rows)[run])
    k_offset = (key_row - edges[:-1])[document[source]]
    return tables.sorted_cells(bands.shift(cut, (local - begin)[run], k_offset), rank[run])


def _key_order(at: list[np.ndarray], rank: int, size: int, most: int) -> np.ndarray:
    """Rows of the gathered buffer of the group of ``rank`` in the order of their positions."""
    first = rank // size * size
    members = at[first : first + size]
    row = np.concatenate([i * most + np.arange(len(p)) for i, p in enumerate(members)])
    return row[np.argsort(np.concatenate(members))]


def _pad(rows: list[np.ndarray]) -> np.ndarray:
    """Stacks lists of rows, -1 in padding, at least one column; int32."""
    most = max(1, *(len(row) for row in rows)) if rows else 1
    return np.stack([np.pad(row, (0, most - len(row)), constant_values=-1) for row in rows]).astype(
        np.int32
    )
