"""Placements of long runs of rows: documents in two piles, dealt out row by row.

Documents whose rows see more keys than the mean make one pile, the others a second one. Each rank takes the
next rows of both, as many of either as give it its tokens and its area exactly. A rank so holds a run of
dense and a run of light rows, few documents are cut, and balance asks for no exchange at all: chunks, which
have only a few sizes, buy it with rows that cross ranks.

Documents whose rows see more and more keys, as under a causal mask, are *folded*: their rows are dealt from
both ends by turns, so that every part of one has the same density, and all parts send about as much.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver.dispatch.problem import Assignment, DispatchProblem
from magi_jax.solver.engine import compiled

# Orders of the dense and of the light pile: as in the sequence, by falling density, or one of the densest
# half and one of the other by turns, so that few runs have two dense documents.
IN_SEQUENCE, FALLING, BY_TURNS = "sequence", "falling", "turns"
ALL_ORDERS = tuple(
    (dense, light) for dense in (IN_SEQUENCE, FALLING, BY_TURNS) for light in (IN_SEQUENCE, FALLING)
)
# Halves of a folded document differ by more than this share of its area.
FOLDED = 0.1
# Places where a function is looked at before it is halved.
PROBES = 8
# Where there are more documents than this, there are others to fill every gap.
MOST_DOCUMENTS, MOST_SLICES = 16_384, 131_072


def runs(
    problem: DispatchProblem, orders: Sequence[tuple[str, str]] = ALL_ORDERS
) -> list[Assignment]:
    """One placement for each of ``orders``; none where the sequence is not made of several documents."""
    if len(problem.travelling) or len(problem.slices) > MOST_SLICES:
        return []
    seq_len = int(problem.edges[-1])
    edges = document_edges(problem.slices, seq_len)
    if not 2 < len(edges) <= MOST_DOCUMENTS + 1 or seq_len < problem.cp_size:
        return []
    rows = _RowAreas.of(problem.slices, edges)
    area = np.diff(rows.before(edges))
    density = area / np.diff(edges)
    is_dense = area * seq_len > area.sum() * np.diff(edges)
    half = rows.before((edges[1:] + edges[:-1]) // 2) - rows.before(edges[:-1])
    folded = np.abs(area - 2 * half) > FOLDED * area
    found = []
    for dense_order, light_order in orders:
        piles = [
            _Pile.of(_ordered(np.flatnonzero(kind), density, order), edges, area, folded)
            for kind, order in ((is_dense, dense_order), (~is_dense, light_order))
        ]
        tokens = seq_len * np.arange(problem.cp_size + 1) // problem.cp_size
        dense, light = piles
        deal = _deal_compiled if problem.engine == "compiled" else _deal
        taken = deal(dense, light, rows, tokens)
        found.append(_assignment(piles, (taken, tokens - taken), seq_len))
    return found


def document_edges(slices: np.ndarray, seq_len: int) -> np.ndarray:
    """Edges ``[N + 1]`` of the parts of a sequence that share no visible pair: no slice crosses one."""
    begin = np.minimum(slices[:, bands.Q_START], slices[:, bands.K_START])
    end = np.maximum(slices[:, bands.Q_END], slices[:, bands.K_END])
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    # Between two documents there may be rows that see nothing; they are one of their own.
    first = np.append(True, begin[1:] >= reach[:-1])[: len(begin)]
    last = np.append(first[1:], True)[: len(begin)]
    return np.unique(np.concatenate([[0], begin[first], reach[last], [seq_len]]))


class _RowAreas(NamedTuple):
    """Visible keys of every row, as a function that is linear between points.

    Attributes:
        at: ``[P]`` rows, rising, some more than once; the first is 0.
        keys: ``[P]`` keys of the row ``at``; the last entry of a row counts.
        slope: ``[P]`` more keys of each row after it.
        total: ``[P]`` keys of all rows before ``at``.
    """

    at: np.ndarray
    keys: np.ndarray
    slope: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, slices: np.ndarray, edges: np.ndarray) -> "_RowAreas":
        q0, q1, k0, k1, d0, d1 = slices.T
        # Row q sees keys [max(k0, q + d0), min(k1, q + d1 + 1)).
        high, low = np.clip(k1 - d1 - 1, q0, q1), np.clip(k0 - d0, q0, q1)
        ones = np.ones_like(q0)
        parts = (
            (q0, q0 + d1 + 1 - k0, ones),
            (high, k1 - (high + d1 + 1), -ones),
            (low, k0 - (low + d0), -ones),
            (q1, -(np.minimum(k1, q1 + d1 + 1) - np.maximum(k0, q1 + d0)), 0 * ones),
        )
        at, keys, slope = (np.concatenate(column) for column in zip(*parts, strict=True))
        # What a slice still rises by where it ends.
        ends = np.where(high < q1, 0, 1) - np.where(low < q1, 1, 0)
        slope[-len(q0) :] = -ends
        none = np.zeros_like(edges)
        at, keys, slope = (
            np.append(column, more)
            for column, more in zip((at, keys, slope), (edges, none, none), strict=True)
        )
        order = np.argsort(at, kind="stable")
        at, slope = at[order], np.cumsum(slope[order])
        gap = np.diff(at, append=at[-1:])
        keys = np.cumsum(keys[order] + np.append(0, (slope * gap)[:-1]))
        area = keys * gap + slope * (gap * (gap - 1) // 2)
        return cls(at, keys, slope, np.cumsum(area) - area)

    def before(self, row: np.ndarray) -> np.ndarray:
        """Keys of all rows before each of ``row``."""
        point = np.searchsorted(self.at, row, side="right") - 1
        n = row - self.at[point]
        return self.total[point] + self.keys[point] * n + self.slope[point] * (n * (n - 1) // 2)


class _Pile(NamedTuple):
    """Documents in the order in which they are dealt.

    Attributes:
        documents: ``[D]``.
        first: ``[D + 1]`` rows of the pile before each document.
        area: ``[D + 1]`` area of the pile before each document.
        begin, end: ``[D]`` rows of each document in the sequence.
        folded: ``[D]`` whether its rows are dealt from both ends.
    """

    documents: np.ndarray
    first: np.ndarray
    area: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    folded: np.ndarray

    @classmethod
    def of(
        cls, documents: np.ndarray, edges: np.ndarray, area: np.ndarray, folded: np.ndarray
    ) -> "_Pile":
        size = np.diff(edges)[documents]
        return cls(
            documents,
            np.append(0, np.cumsum(size)),
            np.append(0, np.cumsum(area[documents])),
            edges[documents],
            edges[documents + 1],
            folded[documents],
        )

    @property
    def num_rows(self) -> int:
        return int(self.first[-1])

    def ends_taken(self, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the first rows of the pile end, ``taken`` of them: in which document, how many rows from its
        front, and how many from its back.
        """
        place = np.searchsorted(self.first, taken, side="right") - 1
        place = np.minimum(place, len(self.documents) - 1)
        inside = taken - self.first[place]
        back = np.where(self.folded[place], inside // 2, 0)
        return place, inside - back, back

    def area_of(self, taken: np.ndarray, rows: _RowAreas) -> np.ndarray:
        """Area of the first rows of the pile, ``taken`` of them."""
        if not len(self.documents):
            return np.zeros_like(taken)
        place, front, back = self.ends_taken(taken)
        begin, end = self.begin[place], self.end[place]
        of_front = rows.before(begin + front) - rows.before(begin)
        return self.area[place] + of_front + rows.before(end) - rows.before(end - back)


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


def _deal(dense: _Pile, light: _Pile, rows: _RowAreas, tokens: np.ndarray) -> np.ndarray:
    """How many rows of the dense pile the first ranks have together, ``[cp + 1]``, when they have ``tokens
    [cp + 1]`` of both: as many as bring each rank nearest to an even share of the area that is left.
    """
    total = int(dense.area[-1] + light.area[-1])
    taken, done = [0], 0
    for r in range(1, len(tokens)):
        everything = int(tokens[r])
        target = done + (total - done) // (len(tokens) - r)

        def area(of_dense: int, everything: int = everything) -> int:
            both = ((dense, of_dense), (light, everything - of_dense))
            return sum(int(pile.area_of(np.array([n]), rows)[0]) for pile, n in both)

        low = max(taken[-1], everything - light.num_rows)
        high = min(taken[-1] + everything - int(tokens[r - 1]), dense.num_rows)
        taken.append(_nearest(area, target, low, high))
        done = area(taken[-1])
    return np.array(taken, np.int64)


def _nearest(function: Callable[[int], int], target: int, low: int, high: int) -> int:
    """The place in ``[low, high]`` where a function is nearest to ``target``: where it first crosses it
    between a few probes, or at the best of them.
    """
    best, last = low, low
    for i in range(1, PROBES + 1):
        place = low + (high - low) * i // PROBES
        if (function(place) < target) != (function(last) < target):
            a, b = last, place
            while b - a > 1:
                middle = a + (b - a) // 2
                same = (function(middle) < target) == (function(a) < target)
                a, b = (middle, b) if same else (a, middle)
            return a if abs(function(a) - target) <= abs(function(b) - target) else b
        if abs(function(place) - target) < abs(function(best) - target):
            best = place
        last = place
    return best


def _deal_compiled(dense: _Pile, light: _Pile, rows: _RowAreas, tokens: np.ndarray) -> np.ndarray:
    return compiled().deal_runs(
        np.stack(rows),
        *((pile.first, pile.area, pile.begin, pile.end, pile.folded) for pile in (dense, light)),
        tokens,
    )


def _assignment(
    piles: list[_Pile], cuts: tuple[np.ndarray, np.ndarray], seq_len: int
) -> Assignment:
    """Pieces of all documents, cut where the share of a rank ends in its pile."""
    begins, sizes, owners = [], [], []
    for pile, cut in zip(piles, cuts, strict=True):
        if not len(pile.documents):
            continue
        edges = np.union1d(pile.first, cut)[:-1]
        owner = np.searchsorted(cut, edges, side="right") - 1
        place, front, back = pile.ends_taken(edges)
        inside = np.append(edges[1:], pile.first[-1]) - pile.first[place]
        last_back = np.where(pile.folded[place], inside // 2, 0)
        begins += [pile.begin[place] + front, pile.end[place] - last_back]
        sizes += [inside - last_back - front, last_back - back]
        owners += [owner, owner]
    begin, size, owner = (np.concatenate(column) for column in (begins, sizes, owners))
    order = np.argsort(begin, kind="stable")
    order = order[size[order] > 0]
    return Assignment(np.append(begin[order], seq_len), owner[order])
