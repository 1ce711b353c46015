"""The steps of the planner's search in NumPy: see `numpy_placement` and ``xla_ffi/solver/refine.cc``."""

from typing import Any

import numpy as np

FIXED_POINT = float(2**32)
LARGEST = 4.0  # relative load beyond which the potential is flat
AREA_SLOPE, AREA_CURVE = 300.0, 30000.0
HOPELESS = 4 << 32  # rise of the area penalty that no volume makes up for
RESCALE_PERIOD = 2048
TOURNAMENT = 3
REPAIRS, REPAIR_WIDTH = 24, 12
MASK64 = (1 << 64) - 1


class SplitMix64:
    """The generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators"."""

    def __init__(self, seed: int):
        self._state = seed & MASK64

    def next(self) -> int:
        """The next 64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & MASK64
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """A number of ``[0, n)``."""
        return (self.next() >> 32) * n >> 32


class Search:
    """State of `NumpyPlacement.refine`."""

    def __init__(
        self,
        placement: Any,
        owner: np.ndarray,
        area_limit: int,
        seed: int,
        node_weight: float,
    ):
        self.p, self.owner, self.random = placement, owner.copy(), SplitMix64(seed)
        self.area_limit, self.node_weight = area_limit, node_weight
        ranks = placement.num_ranks
        self.inverse_mean = 1.0 / max(int(placement.area.sum()) / ranks, 1.0)
        self.loads, self.area = placement.measure(owner)
        self.units = [np.flatnonzero(owner == rank).tolist() for rank in range(ranks)]
        self.spares = np.bincount(owner, weights=placement.spare, minlength=ranks).astype(np.int64)
        self.counts = np.zeros((ranks, len(placement.rows)), np.int64)
        np.add.at(self.counts, owner, placement.sees)
        self.by_area = np.argsort(-placement.area, kind="stable").tolist()
        self.area_place = np.argsort(self.by_area).tolist()
        self.rising_debt = -placement.area[self.by_area]

    def rescale(self) -> None:
        """Measures potentials against the largest load of ranks and of nodes."""
        ranks = 2 * self.p.num_ranks
        scale = [1.0 / max(int(part.max()), 1) for part in np.split(self.loads, [ranks])]
        self.weight = np.repeat(scale, [ranks, len(self.loads) - ranks])
        self.factor = np.repeat([1.0, self.node_weight], [ranks, len(self.loads) - ranks])
        self.potential = self._potential(self.loads)
        self.penalty = [self._penalty(int(area)) for area in self.area]

    def step(self, tolerance: int) -> None:
        """Proposes one exchange."""
        bits = self.random.next()
        u = self._draw_unit(bool(bits & 1))
        v = -1 if u < 0 else self._draw_partner(u, bits >> 1)
        if not self._may_trade(u, v):
            return
        rise = self._price_area(u, v)
        if rise <= HOPELESS + tolerance:
            self._trade(u, v, tolerance - rise)

    def double_step(self, tolerance: int) -> None:
        """Proposes an exchange that rows ask for, and a second one that mends the balance after it."""
        bits, below = self.random.next(), self.random.below
        hot = self._hottest() if bits & 1 else below(self.p.num_ranks)
        if not self.units[hot]:
            return
        u = self.units[hot][below(len(self.units[hot]))]
        v = below(len(self.owner)) if bits & 2 else self._draw_partner(u, bits >> 2)
        if not self._may_trade(u, v):
            return
        r, s = int(self.owner[u]), int(self.owner[v])
        rise = self._price_area(u, v)
        rows_rise = self._trade(u, v, tolerance)
        if rows_rise is None or rise + rows_rise <= tolerance:
            return
        rise += rows_rise
        heavy = r if self.penalty[r] > self.penalty[s] else s
        for _ in range(REPAIRS):
            x = self.units[heavy][below(len(self.units[heavy]))]
            target = int(self.p.area[x] - (self.area[heavy] - self.area_limit))
            place = int(np.searchsorted(self.rising_debt, -target)) + below(REPAIR_WIDTH)
            if place >= len(self.owner):
                continue
            y = self.by_area[place]
            if not self._may_trade(x, y):
                continue
            second = self._price_area(x, y)
            if rise + second > tolerance + HOPELESS:
                continue
            if self._trade(x, y, tolerance - rise - second) is not None:
                return
        self._trade(u, v, None)

    def _may_trade(self, u: int, v: int) -> bool:
        if u < 0 or v < 0:
            return False
        p, r, s = self.p, int(self.owner[u]), int(self.owner[v])
        if r == s or p.size[u] != p.size[v]:
            return False
        return p.spare[u] == p.spare[v] or self.spares[s if p.spare[u] else r] == 0

    def _price_area(self, u: int, v: int) -> int:
        """Rise of the penalty when two units trade ranks."""
        r, s, gain = int(self.owner[u]), int(self.owner[v]), int(self.p.area[v] - self.p.area[u])
        after = self._penalty(int(self.area[r]) + gain) + self._penalty(int(self.area[s]) - gain)
        return after - self.penalty[r] - self.penalty[s]

    def _trade(self, u: int, v: int, tolerance: int | None) -> int | None:
        """Trades two units if the potential of rows rises by at most ``tolerance`` (None: always), and
        returns that rise, or None.
        """
        p, r, s = self.p, int(self.owner[u]), int(self.owner[v])
        moved = p.sees[v].astype(np.int64) - p.sees[u]
        self.counts[r] += moved
        self.counts[s] -= moved
        self.owner[u], self.owner[v] = s, r
        loads = p.loads(self.counts > 0, self.owner[p.home])
        potential = self._potential(loads)
        rise = int((potential - self.potential).sum())
        if tolerance is not None and rise > tolerance:
            self.counts[r] -= moved
            self.counts[s] += moved
            self.owner[u], self.owner[v] = r, s
            return None
        gain = int(p.area[v] - p.area[u])
        self.loads, self.potential = loads, potential
        self.area[r] += gain
        self.area[s] -= gain
        for rank in (r, s):
            self.penalty[rank] = self._penalty(int(self.area[rank]))
        self.spares[r] += p.spare[v] - p.spare[u]
        self.spares[s] += p.spare[u] - p.spare[v]
        at_r, at_s = self.units[r].index(u), self.units[s].index(v)
        self.units[r][at_r], self.units[s][at_s] = v, u
        return rise

    def _hottest(self) -> int:
        return max(range(self.p.num_ranks), key=lambda rank: (self._heat(rank), -rank))

    def _potential(self, loads: np.ndarray) -> np.ndarray:
        x = np.minimum(loads * self.weight, LARGEST)
        x = x * x
        x = x * x
        return (x * x * self.factor * FIXED_POINT).astype(np.int64)

    def _penalty(self, area: int) -> int:
        x = (area - self.area_limit) * self.inverse_mean
        return 0 if x <= 0.0 else int((AREA_SLOPE * x + AREA_CURVE * x * x) * FIXED_POINT)

    def _heat(self, rank: int) -> int:
        received, sent = self.potential[rank], self.potential[self.p.num_ranks + rank]
        return int(received) + int(sent) + self.penalty[rank]

    def _draw_unit(self, hot: bool) -> int:
        below = self.random.below
        if not hot:
            return below(len(self.owner))
        rank = below(self.p.num_ranks)
        for _ in range(TOURNAMENT):
            other = below(self.p.num_ranks)
            if self._heat(other) > self._heat(rank):
                rank = other
        units = self.units[rank]
        return units[below(len(units))] if units else -1

    def _draw_partner(self, u: int, bits: int) -> int:
        below, count = self.random.below, len(self.owner)
        narrow = bool(bits & 2)
        if not bits & 1:
            if not bits & 4:
                return below(count)
            width = 8 if narrow else 64
            place = self.area_place[u] + below(2 * width + 1) - width
            return self.by_area[place] if 0 <= place < count else -1
        width = 4 if narrow else 24
        neighbour = u + below(2 * width + 1) - width
        if not 0 <= neighbour < count:
            return -1
        units = self.units[self.owner[neighbour]]
        start = below(len(units))
        if bits & 4:
            return units[start]
        like = [v for v in units[start:] + units[:start] if self.p.size[v] == self.p.size[u]]
        return min(like, key=lambda v: abs(int(self.p.area[v] - self.p.area[u])), default=-1)
