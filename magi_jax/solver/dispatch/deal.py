"""Dealing two piles of documents out row by row: the twin of ``xla_ffi/solver/runs.cc``.

Each rank takes the first rows of both piles, as many of either as bring it nearest to an even share of
the area that is left. Where no mixture comes near, documents that are denser, or lighter, are brought
forward; and where that does not help, the rank takes neighbouring rows from further on in the piles.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from magi_jax.solver.dispatch.problem import RowAreas
from magi_jax.solver.engine import compiled

# Places where a function is looked at before it is halved.
PROBES = 8
# A miss of more than a rank's area over this is mended, by so many documents at most.
TOLERANCE, MENDS = 500, 8
# Of a rank's rows, in which windows are tried.
STEPS = 8


def deal(
    rows: RowAreas, dense: np.ndarray, light: np.ndarray, shares: np.ndarray, engine: str
) -> np.ndarray:
    """Pieces of all documents: ``[N, 3]`` of (first row, rows, rank).

    Args:
        rows: areas of all rows.
        dense: the dense pile, ``[D, 3]`` of (begin, end, whether it is folded), in the order in which it is
            dealt. Of a folded document rows come from the front and from the back by turns.
        light: the light pile.
        shares: ``[cp, 2]`` tokens of each rank, and area that it has whatever is dealt.
        engine: "compiled" or "numpy"; both deal the same.
    """
    if engine == "compiled":
        return compiled().deal_runs(np.stack(rows), dense, light, shares)
    piles = _Piles(*(_Pile(rows, _documents(pile)) for pile in (dense, light)))
    pieces: list[tuple[int, int, int]] = []
    left = piles.area + int(shares[:, 1].sum())
    for rank, (tokens, area) in enumerate(shares.tolist()):
        wanted = left // (len(shares) - rank) - area
        left -= area + piles.deal(rank, tokens, wanted, pieces)
    return np.array(pieces, np.int64).reshape(-1, 3)


class _Place(NamedTuple):
    """Where a function is nearest to 0, and its value there."""

    at: int
    miss: int


def _nearest(excess: Callable[[int], int], places: Sequence[int]) -> _Place:
    """At the first change of sign between places, or at the best of them."""
    best = last = _Place(places[0], excess(places[0]))
    for at in places[1:]:
        found = _Place(at, excess(at))
        if (found.miss < 0) != (last.miss < 0):
            return _halved(excess, last, found)
        if abs(found.miss) < abs(best.miss):
            best = found
        last = found
    return best


def _halved(excess: Callable[[int], int], a: _Place, b: _Place) -> _Place:
    while b.at - a.at > 1:
        middle = a.at + (b.at - a.at) // 2
        found = _Place(middle, excess(middle))
        a, b = (found, b) if (found.miss < 0) == (a.miss < 0) else (a, found)
    return a if abs(a.miss) <= abs(b.miss) else b


class _Document(NamedTuple):
    """Rows of ``[begin, end)`` in the order in which they are dealt, those from ``first`` to ``last``."""

    begin: int
    end: int
    first: int
    last: int
    folded: bool

    @property
    def size(self) -> int:
        return self.last - self.first

    def ends(self, row: int) -> tuple[int, int]:
        """Where the rows up to ``row`` end from the front, and begin from the back."""
        back = row // 2 if self.folded else 0
        return self.begin + row - back, self.end - back

    def part(self, low: int, high: int) -> "_Document":
        """What of it lies between two rows."""
        first = min(max(low, self.first), self.last)
        return self._replace(first=first, last=min(max(high, first), self.last))


def _documents(table: np.ndarray) -> list[_Document]:
    return [_Document(a, b, 0, b - a, bool(folded)) for a, b, folded in table.tolist()]


class _Pile:
    """Documents in the order in which they are dealt; rows are counted from the first that is left."""

    def __init__(self, rows: RowAreas, documents: list[_Document], taken: int = 0):
        self.rows, self.documents, self.taken = rows, documents, taken
        self.first, self.areas = [0], [0]
        for document in documents:
            self.first.append(self.first[-1] + document.size)
            self.areas.append(self.areas[-1] + self._area_of(document, document.size))

    @property
    def num_rows(self) -> int:
        return self.first[-1] - self.taken

    def area(self, count: int) -> int:
        """Of the first rows, ``count`` of them."""
        return self._area_to(self.taken + count) - self._area_to(self.taken)

    def _area_to(self, row: int) -> int:
        i = self._document_at(row)
        if i == len(self.documents):
            return self.areas[i]
        return self.areas[i] + self._area_of(self.documents[i], row - self.first[i])

    def _document_at(self, row: int) -> int:
        return bisect.bisect_right(self.first, row) - 1

    def _area_of(self, document: _Document, count: int) -> int:
        """Of the first rows of a document, ``count`` of them."""
        ends = (document.ends(row) for row in (document.first, document.first + count))
        (a, d), (b, c) = (self.rows.before(np.array(pair)).tolist() for pair in ends)
        return b - a + d - c

    def take(self, low: int, high: int, rank: int, pieces: list[tuple[int, int, int]]) -> "_Pile":
        """The pile without rows ``[low, high)``, which go to a rank."""
        if low >= high:
            return self
        low, high = low + self.taken, high + self.taken
        for first, document in zip(self.first, self.documents, strict=False):
            shift = document.first - first
            part = document.part(low + shift, high + shift)
            (a, d), (b, c) = document.ends(part.first), document.ends(part.last)
            pieces += [(x, y - x, rank) for x, y in ((a, b), (c, d)) if x < y]
        if low == self.taken:
            return _Pile(self.rows, self.documents, high)
        return self._without(low, high)

    def _without(self, low: int, high: int) -> "_Pile":
        """Documents without rows that were taken before and rows ``[low, high)``."""
        left = []
        for first, document in zip(self.first, self.documents, strict=False):
            shift = document.first - first
            for part in ((self.taken, low), (high, self.first[-1])):
                left.append(document.part(part[0] + shift, part[1] + shift))
        return _Pile(self.rows, [document for document in left if document.size])

    def extreme(self, most: bool) -> tuple[int, float]:
        """The document of all but the first that is left whose rows see most keys, or fewest, and how many
        they see; -1: none.
        """
        best, density = -1, 0.0
        for i in range(self._document_at(self.taken) + 1, len(self.documents)):
            found = (self.areas[i + 1] - self.areas[i]) / self.documents[i].size
            if best < 0 or (found > density if most else found < density):
                best, density = i, found
        return best, density

    def removed(self, i: int) -> tuple[_Document, "_Pile"]:
        """A document that is not begun, and the pile without it."""
        documents = list(self.documents)
        return documents.pop(i), _Pile(self.rows, documents, self.taken)

    def begun_with(self, document: _Document) -> "_Pile":
        """The pile with another document before all that are left."""
        return _Pile(self.rows, [document, *self._without(self.taken, self.taken).documents])


class _Piles:
    def __init__(self, dense: _Pile, light: _Pile):
        self.dense, self.light = dense, light

    @property
    def area(self) -> int:
        return self.dense.area(self.dense.num_rows) + self.light.area(self.light.num_rows)

    def deal(self, rank: int, tokens: int, area: int, pieces: list[tuple[int, int, int]]) -> int:
        """Gives ``tokens`` rows to a rank, of which ``area`` is wanted; the area that it gets."""
        tolerance, mixed = abs(area) // TOLERANCE, self._mix(tokens, area)
        for _ in range(MENDS):
            if abs(mixed.miss) <= tolerance:
                break
            other = self._with_one_brought_forward(mixed.miss < 0)
            if other is None:
                break
            found = other._mix(tokens, area)
            if abs(found.miss) >= abs(mixed.miss):
                break
            mixed, self.dense, self.light = found, other.dense, other.light
        if abs(mixed.miss) > tolerance:
            window = self._find_window(tokens, area)
            if abs(window.miss) < abs(mixed.miss):
                num_dense, low, high = self.dense.num_rows, window.at, window.at + tokens
                num_rows = num_dense + self.light.num_rows
                self.dense = self.dense.take(low, min(high, num_dense), rank, pieces)
                of_light = num_rows - high, num_rows - max(low, num_dense)
                self.light = self.light.take(*of_light, rank, pieces)
                return area + window.miss
        self.dense = self.dense.take(0, mixed.at, rank, pieces)
        self.light = self.light.take(0, tokens - mixed.at, rank, pieces)
        return area + mixed.miss

    def _mix(self, tokens: int, area: int) -> _Place:
        """Rows of the dense pile among ``tokens`` first rows of both."""

        def excess(of_dense: int) -> int:
            return self.dense.area(of_dense) + self.light.area(tokens - of_dense) - area

        low = max(tokens - self.light.num_rows, 0)
        high = min(tokens, self.dense.num_rows)
        return _nearest(excess, [low + (high - low) * i // PROBES for i in range(PROBES + 1)])

    def _with_one_brought_forward(self, more: bool) -> "_Piles | None":
        """A document that is not begun comes next: one that makes the dense pile denser, or the light one
        lighter.
        """
        (i, of_dense), (j, of_light) = self.dense.extreme(more), self.light.extreme(more)
        if i < 0 and j < 0:
            return None
        dense, light = self.dense, self.light
        is_dense = of_dense >= of_light if more else of_dense <= of_light
        if j < 0 or (i >= 0 and is_dense):
            found, dense = dense.removed(i)
        else:
            found, light = light.removed(j)
        if more:
            return _Piles(dense.begun_with(found), light)
        return _Piles(dense, light.begun_with(found))

    def _find_window(self, tokens: int, area: int) -> _Place:
        """Neighbouring rows of the dense pile followed by the light one from its end: somewhere among them
        are some of any mean.
        """
        num_dense = self.dense.num_rows
        num_rows = num_dense + self.light.num_rows

        def before(row: int) -> int:
            if row <= num_dense:
                return self.dense.area(row)
            return self.area - self.light.area(num_rows - row)

        def excess(row: int) -> int:
            return before(row + tokens) - before(row) - area

        step = max(tokens // STEPS, 1)
        return _nearest(excess, [*range(0, num_rows - tokens, step), num_rows - tokens])
