"""Placements of long runs of rows: documents in two piles, dealt out row by row.

Documents whose rows see more keys than the mean make one pile, the others a second one. Each rank takes the
next rows of both, as many of either as give it its tokens and its area exactly. A rank so holds a run of
dense and a run of light rows, few documents are cut, and balance asks for no exchange at all: chunks, which
have only a few sizes, buy it with rows that cross ranks.

A sequence that is one document is dealt in its dense and its light part, such as the frames of a video whose
window is full, and the first ones.

Documents whose rows see more and more keys, as under a causal mask, are *folded*: their rows are dealt from
both ends by turns, so that every part of one has the same density, and all parts send about as much.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.dispatch.deal import deal
from magi_jax.solver.dispatch.documents import document_edges, document_groups
from magi_jax.solver.dispatch.problem import Assignment, DispatchProblem, RowAreas, even_cuts

# Orders of the dense and of the light pile: as in the sequence, by falling density, or one of the densest
# half and one of the other by turns, so that few runs have two dense documents.
IN_SEQUENCE, FALLING, BY_TURNS = "sequence", "falling", "turns"
ALL_ORDERS = tuple(
    (dense, light) for dense in (IN_SEQUENCE, FALLING, BY_TURNS) for light in (IN_SEQUENCE, FALLING)
)
# Halves of a folded document differ by more than this share of its area.
FOLDED = 0.1
# A document by itself is dealt if it has no more slices: one causal mask, or one with a prefix.
FEW_SLICES = 2
# One of more slices is dealt where so many parts at most are denser or lighter than all of it.
MOST_PARTS = 4
# Rows at a time of a light head that another rank takes: tiles of kernels have as many.
HEAD_STEP = 128
# Where there are more documents or slices than this, neighbouring documents are dealt together, in so many
# groups at most.
MOST_DOCUMENTS, MOST_SLICES, MOST_GROUPS = 8_192, 131_072, 8_192


def runs(
    problem: DispatchProblem, orders: Sequence[tuple[str, str]] = ALL_ORDERS
) -> Iterator[Assignment]:
    """One placement for each of ``orders``, dealt when it is asked for; none where the sequence is one
    document of many slices whose rows are dense and light by turns, or all alike.
    """
    seq_len, cp_size = int(problem.edges[-1]), problem.cp_size
    if seq_len < cp_size:
        return
    edges, slices = _parts(problem)
    few_slices = len(problem.slices) <= FEW_SLICES
    if len(edges) == 2 and not few_slices:
        edges = _density_edges(slices, seq_len)
    if len(edges) == 2 and not few_slices and not len(problem.travelling):
        return
    held = _travelling_rows(problem.travelling, cp_size)
    if len(held):
        edges = intervals.distinct(edges, held[:, 0], held[:, 0] + held[:, 1])
        slices = np.concatenate([slices, bands.transpose(problem.travelling)])
    documents = Documents.of(RowAreas.of(slices, edges), edges)
    shares = _shares(documents, held, cp_size)
    if len(held):
        documents = documents.outside(held[:, 0], held[:, 0] + held[:, 1])
    number = len(documents.area)
    if number < 1 or (number == 1 and not few_slices) or (shares < 0).any():
        return
    if number == 1 and not len(held) and not documents.table[0, 2]:
        # All parts of it are alike: neighbours stay together.
        tokens = np.append(0, np.cumsum(shares[:, 0]))
        yield Assignment(tokens, np.arange(cp_size))
        if cp_size == 2 and (begin := _light_head(documents.rows, tokens)):
            yield Assignment(np.array([0, begin, begin + tokens[1], seq_len]), np.array([1, 0, 1]))
        return
    for order in orders if number > 1 else orders[:1]:
        pieces = deal(documents.rows, *documents.piles(order), shares, problem.engine)
        yield assignment_of(np.concatenate([pieces, held]), seq_len)


def _light_head(rows: RowAreas, tokens: np.ndarray) -> int:
    """How many of the first rows, whose window is not full yet, the second of two ranks takes from the first
    to have as much area; in whole tiles. 0: none.
    """
    begin = np.arange(0, tokens[2] - tokens[1] + 1, HEAD_STEP)
    of_first = rows.before(begin + tokens[1]) - rows.before(begin)
    return int(begin[np.argmin(np.abs(2 * of_first - rows.before(tokens[2:])))])


def _parts(problem: DispatchProblem) -> tuple[np.ndarray, np.ndarray]:
    """Edges of the documents that are dealt, and slices of as much area: groups of documents, where there are
    so many that each of them matters little.
    """
    slices, seq_len = problem.slices, int(problem.edges[-1])
    if len(slices) <= MOST_SLICES:
        edges = document_edges(slices, seq_len)
        if len(edges) <= MOST_DOCUMENTS:
            return edges, slices
    return document_groups(slices, seq_len, MOST_GROUPS, problem.engine)


def _density_edges(slices: np.ndarray, seq_len: int) -> np.ndarray:
    """Edges of the parts of a document whose rows see more keys than the mean, and less, such as the first
    frames of a video before its window is full; of the whole document where there are many parts.
    """
    at = intervals.distinct(
        slices[:, bands.Q_START], slices[:, bands.Q_END], np.array([0, seq_len])
    )
    area = np.diff(RowAreas.of(slices, at).before(at))
    is_dense = area / np.diff(at) > area.sum() / seq_len  # products would not fit 64 bits
    edges = at[np.append(np.append(True, is_dense[1:] != is_dense[:-1]), True)]
    return edges if len(edges) <= MOST_PARTS + 1 else edges[[0, -1]]


class Documents(NamedTuple):
    """Documents of a sequence.

    Attributes:
        rows: areas of all rows.
        table: ``[N, 3]`` of (begin, end, whether it is folded).
        area: ``[N]`` of each.
    """

    rows: RowAreas
    table: np.ndarray
    area: np.ndarray

    @classmethod
    def of(cls, rows: RowAreas, edges: np.ndarray) -> "Documents":
        """Those between ``edges [N + 1]``."""
        return cls.between(rows, edges[:-1], edges[1:])

    @classmethod
    def between(cls, rows: RowAreas, begin: np.ndarray, end: np.ndarray) -> "Documents":
        """Parts ``[begin, end)``, none of which is empty."""
        before = rows.before(begin)
        area = rows.before(end) - before
        half = rows.before((begin + end) // 2) - before
        folded = np.abs(area - 2 * half) > FOLDED * area
        return cls(rows, np.stack([begin, end, folded], axis=1), area)

    @property
    def size(self) -> np.ndarray:
        """Rows of each ``[N]``."""
        return self.table[:, 1] - self.table[:, 0]

    def outside(self, begin: np.ndarray, end: np.ndarray) -> "Documents":
        """Those outside of ranges ``[begin, end)``, which rise and end where documents do."""
        first = self.table[:, 0]
        last = np.searchsorted(begin, first, side="right") - 1
        kept = (last < 0) | (first >= end[last])
        return Documents(self.rows, self.table[kept], self.area[kept])

    def piles(self, order: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
        """The dense and the light pile, rows of ``table`` in the given orders."""
        size = self.size
        density = self.area / size
        is_dense = density > self.area.sum() / size.sum()
        dense, light = (
            self.table[_ordered(np.flatnonzero(kind), density, each)]
            for kind, each in zip((is_dense, ~is_dense), order, strict=True)
        )
        return dense, light


def _travelling_rows(travelling: np.ndarray, cp_size: int) -> np.ndarray:
    """Rows of queries that travel, ``[N, 3]`` of (first row, rows, rank): as many on each rank, which sends
    them to the others.
    """
    _, begin, end = intervals.union(
        np.zeros(len(travelling), np.int64),
        travelling[:, bands.Q_START],
        travelling[:, bands.Q_END],
    )
    before = np.append(0, np.cumsum(end - begin))
    cuts = even_cuts(int(before[-1]), cp_size)
    filled = np.flatnonzero(np.diff(cuts))
    source, part = intervals.meet(before[:-1], before[1:], cuts[filled], cuts[filled + 1])
    low = np.maximum(before[source], cuts[filled[part]])
    high = np.minimum(before[source + 1], cuts[filled[part] + 1])
    return np.stack([begin[source] + low - before[source], high - low, filled[part]], axis=1)


def _shares(documents: Documents, held: np.ndarray, cp_size: int) -> np.ndarray:
    """Tokens of each rank but those that it holds anyhow, and the area that comes with these, ``[cp, 2]``."""
    tokens = np.diff(even_cuts(int(documents.table[-1, 1]), cp_size))
    shares = np.stack([tokens, np.zeros_like(tokens)], axis=1)
    if len(held):
        begin, size, rank = held.T
        area = documents.rows.before(begin + size) - documents.rows.before(begin)
        np.subtract.at(shares[:, 0], rank, size)
        np.add.at(shares[:, 1], rank, area)
    return shares


def assignment_of(pieces: np.ndarray, seq_len: int) -> Assignment:
    """Pieces ``[N, 3]`` of (first row, rows, rank), in any order, as an assignment of ``[0, seq_len)``."""
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    return Assignment(np.append(pieces[:, 0], seq_len), pieces[:, 2])


def _ordered(documents: np.ndarray, density: np.ndarray, order: str) -> np.ndarray:
    if order == IN_SEQUENCE:
        return documents
    falling = documents[np.argsort(-density[documents], kind="stable")]
    if order == FALLING:
        return falling
    half = (len(falling) + 1) // 2
    turns = np.empty_like(falling)
    turns[0::2], turns[1::2] = falling[:half], falling[half:][::-1]
    return turns
