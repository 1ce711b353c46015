"""Bins of whole documents: as many tokens as wanted in each, exactly, and nearly equal weights.

Documents go heaviest first, each to the bin with most room. Bins are then settled one after the other: up to
three documents of a bin change places with as many or fewer of another so that it has its tokens exactly and
its weight nearly.
"""

import functools
import heapq
import itertools
from typing import NamedTuple

import numpy as np

from magi_jax.solver.engine import compiled

# Documents of a bin, evenly spaced, of which sets change places: two at most, three where bins are few.
FEW, FEW_BINS = 24, 8
# Bins that one is tried with. Shares of a bin's weight: close enough; too far off to do it; and at most that
# tokens which are left over may cost.
PARTNERS, CLOSE, FAR, ANYHOW = 4, 500, 20, 4
# Exchanges for each bin that even weights out.
EXCHANGES = 8


class _Sets(NamedTuple):
    """Sets of a few documents of a bin: ``[S, n]`` documents, -1 none; their tokens and weights ``[S]``."""

    documents: np.ndarray
    size: np.ndarray
    weight: np.ndarray

    def of(self, i: int) -> list[int]:
        """The documents of a set."""
        return [document for document in self.documents[i].tolist() if document >= 0]


class Contents:
    """Which documents lie in which bin.

    Args:
        size, weight: tokens and weight of each document ``[D]``.
        is_light: whether it is one of those that even tokens out ``[D]``.
        tokens: of each bin ``[N]``.
        settles: whether to look for bins that have their tokens exactly.
        engine: "numpy" or "compiled"; both pack alike.
    """

    def __init__(
        self,
        size: np.ndarray,
        weight: np.ndarray,
        is_light: np.ndarray,
        tokens: np.ndarray,
        settles: bool,
        engine: str = "numpy",
    ):
        self.size, self.weight, self.is_light = size, weight, is_light
        self.share = max(int(weight.sum()) // len(tokens), 1)
        # What every bin lacks of its weight, and of its tokens.
        self.room = [self.share] * len(tokens)
        self.left = tokens.tolist()
        self.held: list[list[int]] = [[] for _ in tokens]
        self.known: dict[int, _Sets] = {}
        if engine == "compiled":
            pack = compiled().pack_bins
            documents, edges, room, left = pack(size, weight, is_light, tokens, self.share, settles)
            self.held = [part.tolist() for part in np.split(documents, edges[1:-1])]
            self.room, self.left = room.tolist(), left.tolist()
            return
        self._fill()
        if settles:
            self._settle()

    def _fill(self) -> None:
        """Heaviest first, each to where most area is left; then those that even tokens out, to where most are
        missing.
        """
        order = np.argsort(-self.weight, kind="stable")
        is_light = self.is_light[order]
        for loads, documents in ((self.room, order[~is_light]), (self.left, order[is_light])):
            heap = [(-load, i) for i, load in enumerate(loads)]
            heapq.heapify(heap)
            taken = self.weight if loads is self.room else self.size
            rows = zip(
                documents.tolist(), taken[documents].tolist(), self.weight[documents].tolist(),
                self.size[documents].tolist(), strict=True,
            )  # fmt: skip
            for document, amount, weight, size in rows:
                load, at = heap[0]
                heapq.heapreplace(heap, (load + amount, at))
                self.held[at].append(document)
                self.room[at] -= weight
                self.left[at] -= size

    def even_out(self) -> None:
        """Documents of the heaviest bin change places with those of the lightest, whatever their tokens."""
        for _ in range(EXCHANGES * len(self.held)):
            at, partner = self.room.index(min(self.room)), self.room.index(max(self.room))
            gap = (self.room[partner] - self.room[at]) // 2
            if gap * 1000 <= self.share:
                break
            mine, theirs = (np.array([-1, *self.held[i]]) for i in (at, partner))
            less = (self.weight[mine] * (mine >= 0))[:, None] - self.weight[theirs] * (theirs >= 0)
            given, got = divmod(int(np.abs(less - gap).argmin()), len(theirs))
            if not 0 < less[given, got] < 2 * gap:
                break
            sets = (mine[[given]], theirs[[got]])
            self._swap(at, partner, *(x[x >= 0].tolist() for x in sets))

    def _settle(self) -> None:
        """Brings one bin after the other to its tokens and its weight, then those that have tokens left over,
        and in the end evens weights out while tokens stay.
        """
        number = len(self.held)
        waiting = sorted(range(number), key=lambda i: (-abs(self.room[i]), i))
        while len(waiting) > 1:
            at = waiting.pop(0)
            # Those that have most to give of what it lacks.
            sign = 1 if self.room[at] >= 0 else -1
            waiting.sort(key=lambda i: (self.room[i] * sign, i))
            for partner in waiting[:PARTNERS]:
                if not self.left[at] and abs(self.room[at]) <= self.share // CLOSE:
                    break
                most = self.share // FAR if self.left[at] else abs(self.room[at])
                self._exchange(at, partner, (self.left[at], self.room[at]), most)
        over = [i for i in range(number) if self.left[i]]
        for at, partner in itertools.permutations(over[:FEW_BINS], 2):
            if self.left[at] and self.left[partner]:
                wanted = self.left[at], (self.room[at] - self.room[partner]) // 2
                self._exchange(at, partner, wanted, self.share // ANYHOW)
        for _ in range(number):
            if not self._relieve():
                break

    def _relieve(self) -> bool:
        """The heaviest bin and one of the lightest exchange as many tokens for as many; whether they did."""
        at, *others = sorted(range(len(self.held)), key=lambda i: (self.room[i], i))
        if -self.room[at] <= self.share // CLOSE:
            return False
        for partner in others[: -PARTNERS - 1 : -1]:
            gap = (self.room[partner] - self.room[at]) // 2
            if gap > 0 and self._exchange(at, partner, (0, -gap), gap):
                return True
        return False

    def _exchange(self, at: int, partner: int, wanted: tuple[int, int], most: int) -> bool:
        """Sets of documents change places, so that the first bin gets ``wanted``: tokens exactly, and weight
        nearly; none do where that is off by ``most`` or more. Whether any did.
        """
        mine, theirs = self._sets_of(at), self._sets_of(partner)
        size, weight = mine.size + wanted[0], mine.weight + wanted[1]
        # Sets of the other bin by size, and then by weight, in one number.
        low = min(int(theirs.weight.min()), int(weight.min()))
        span = max(int(theirs.weight.max()), int(weight.max())) - low + 1
        key = theirs.size * span + theirs.weight - low
        order = np.argsort(key, kind="stable")
        after = np.searchsorted(key[order], size * span + weight - low)
        near = order[np.clip([after - 1, after], 0, len(order) - 1)]
        miss = np.where(theirs.size[near] == size, np.abs(theirs.weight[near] - weight), most)
        side, given = divmod(int(miss.argmin()), len(size))
        if miss[side, given] >= most:
            return False
        self._swap(at, partner, mine.of(given), theirs.of(int(near[side, given])))
        return True

    def _sets_of(self, i: int) -> _Sets:
        """Sets of documents of a bin that may change places."""
        if i not in self.known:
            together = 3 if len(self.held) <= FEW_BINS else 2
            self.known[i] = _sets(self.held[i], self.size, self.weight, together)
        return self.known[i]

    def _swap(self, at: int, partner: int, given: list[int], got: list[int]) -> None:
        self.known.pop(at, None)
        self.known.pop(partner, None)
        for source, target, moved in ((at, partner, given), (partner, at, got)):
            for document in moved:
                self.held[source].remove(document)
                self.held[target].append(document)
                weight, size = int(self.weight[document]), int(self.size[document])
                self.room[source] += weight
                self.left[source] += size
                self.room[target] -= weight
                self.left[target] -= size


def _sets(held: list[int], size: np.ndarray, weight: np.ndarray, together: int) -> _Sets:
    """No document, each, all pairs and so on, of `FEW` documents of a bin."""
    few = np.array([held[i * len(held) // FEW] for i in range(FEW)] if len(held) > FEW else held)
    few = np.append(few, -1).astype(np.int64)
    places = _places(len(few) - 1, together)
    is_one = few >= 0
    sums = (np.where(is_one, values[few], 0)[places].sum(axis=1) for values in (size, weight))
    return _Sets(few[places], *sums)


@functools.cache
def _places(number: int, together: int) -> np.ndarray:
    """All sets of up to so many of ``number`` places, ``[S, together]``; ``number`` stands for none."""
    chosen = [
        (*places, *(number,) * (together - count))
        for count in range(together + 1)
        for places in itertools.combinations(range(number), count)
    ]
    return np.array(chosen, np.int64)
