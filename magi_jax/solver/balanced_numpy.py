"""The search of the compiled planner in NumPy: slower by two orders, and move for move the same.

It prices an exchange by measuring both ranks anew, where the compiled search updates counts, so that each
checks the other. See ``xla_ffi/solver``.
"""

import numpy as np

from magi_jax.solver.balanced_units import Units

FIXED_POINT = float(2**32)
LARGEST = 4.0  # relative load beyond which the potential is flat
AREA_SLOPE, AREA_CURVE = 300.0, 30000.0
HOPELESS = 4 << 32  # rise of the area penalty that no volume makes up for
RESCALE_PERIOD = 2048
TOURNAMENT = 3
RANK_OVERLOAD, NODE_OVERLOAD = 100.0, 20.0
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


class NumpyPlacement:
    """Twin of ``magi_jax._planner.PlacementProblem``.

    Args:
        units: what to place.
        num_ranks: ranks to place units on.
        ranks_per_node: divides ``num_ranks``.
    """

    def __init__(self, units: Units, num_ranks: int, ranks_per_node: int):
        self.area, self.size, self.spare = units.area, units.size, units.spare
        self.rows = units.rows.astype(np.int64)
        self.num_ranks, self.per_node = num_ranks, ranks_per_node
        self.num_nodes = num_ranks // ranks_per_node
        self.home = np.repeat(np.arange(len(self.area)), np.diff(units.span_ptr))
        self.sees = np.zeros((len(self.area), len(self.rows)), bool)
        reader = np.repeat(np.arange(len(self.area)), np.diff(units.need_ptr))
        for unit, (begin, end) in zip(reader, units.needs, strict=True):
            self.sees[unit, begin:end] = True

    def measure(self, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and area of a placement.

        Returns:
            (rows received and sent by each rank, entering and leaving each node ``[2 R + 2 D]``, area of
            each rank ``[R]``).
        """
        needed = np.zeros((self.num_ranks, len(self.rows)), bool)
        np.logical_or.at(needed, owner, self.sees)
        area = np.zeros(self.num_ranks, np.int64)
        np.add.at(area, owner, self.area)
        return self._loads(needed, owner[self.home]), area

    def _loads(self, needed: np.ndarray, home: np.ndarray) -> np.ndarray:
        """Loads, given which spans each rank needs ``[R, V]`` and who owns each span ``[V]``."""
        by_node = np.any(needed.reshape(self.num_nodes, self.per_node, -1), axis=1)
        loads = []
        for groups, owner in ((needed, home), (by_node, home // self.per_node)):
            far = groups & (np.arange(len(groups))[:, None] != owner)
            sent = np.bincount(owner, weights=far.sum(axis=0) * self.rows, minlength=len(groups))
            loads += [far @ self.rows, sent.astype(np.int64)]
        return np.concatenate(loads)

    def greedy(self, order: np.ndarray, capacity: tuple, weights: tuple) -> np.ndarray:
        """Owner of each unit after one pass in ``order``; see ``xla_ffi/solver/greedy.cc``."""
        tokens, slot, part_slots, light_area = capacity
        volume, held, sent_weight, node_weight, node_held, area_limit = weights
        ranks, nodes = self.num_ranks, self.num_nodes
        node_of = np.arange(ranks) // self.per_node
        holds = np.zeros((ranks, len(self.rows)), bool)
        node_holds = np.zeros((nodes, len(self.rows)), bool)
        area, node_area = np.zeros(ranks, np.int64), np.zeros(nodes, np.int64)
        room, sent = np.full(ranks, tokens, np.int64), np.zeros(ranks, np.int64)
        spares = np.zeros(ranks, np.int64)
        per_area = 1.0 / max(int(self.area.sum()) / ranks, 1.0)
        per_node_area = per_area / self.per_node
        light_per_token = light_area / slot * per_area
        per_row = volume * ranks / max(float(self.rows.sum()), 1.0)
        owner = np.full(len(self.area), -1, np.int32)
        for unit in order.tolist():
            size, sees = int(self.size[unit]), self.sees[unit]
            if size == slot:
                fits = room >= size
            else:
                fits = (room % slot >= size) | ((part_slots > 0) & (room >= slot))
            if self.spare[unit]:
                fits = fits & (spares == 0)
            if not fits.any():
                raise ValueError("the ranks have no room for all units")
            need = self.rows * sees
            new_rows, node_new = ~holds @ need, ~node_holds @ need
            held_rows, node_held_rows = holds @ self.rows, node_holds @ self.rows
            wanted = int((self.rows * holds.sum(axis=0))[self.home == unit].sum())
            y = (node_area + self.area[unit]) * per_node_area
            node_cost = per_row * node_weight * (node_new + node_held * node_held_rows)
            node_cost = node_cost + NODE_OVERLOAD * np.maximum(y - 1.0, 0.0)
            x = (area + self.area[unit]) * per_area
            rows = new_rows + held * held_rows + sent_weight * (sent + wanted)
            light = light_per_token * (room - size)
            overload = RANK_OVERLOAD * np.maximum(x + light - area_limit, 0.0)
            cost = np.where(fits, per_row * rows + x + overload + node_cost[node_of], np.inf)
            best = int(np.argmin(cost))
            if size != slot and room[best] % slot < size:
                part_slots -= 1
            room[best] -= size
            spares[best] += self.spare[unit]
            sent[best] += wanted
            area[best] += self.area[unit]
            node_area[node_of[best]] += self.area[unit]
            holds[best] |= sees
            node_holds[node_of[best]] |= sees
            owner[unit] = best
        return owner

    def refine(
        self,
        owner: np.ndarray,
        area_limit: int,
        moves: int,
        seed: int,
        node_weight: float,
        temperature: float,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Owner of each unit after ``moves`` proposed exchanges, then its `measure`; see
        ``xla_ffi/solver/refine.cc``.
        """
        if not len(self.area) or self.num_ranks < 2:
            return owner.copy(), *self.measure(owner)
        search = _Search(self, owner, area_limit, seed, node_weight)
        for k in range(moves):
            if k % RESCALE_PERIOD == 0:
                search.rescale()
            search.step(int(temperature * (1.0 - k / moves) * FIXED_POINT))
        return search.owner, search.loads, search.area


class _Search:
    """State of `NumpyPlacement.refine`."""

    def __init__(
        self,
        placement: NumpyPlacement,
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
        if v < 0:
            return
        p, r, s = self.p, int(self.owner[u]), int(self.owner[v])
        if r == s or p.size[u] != p.size[v]:
            return
        if p.spare[u] != p.spare[v] and self.spares[s if p.spare[u] else r] > 0:
            return
        gain = int(p.area[v] - p.area[u])
        penalty_r = self._penalty(int(self.area[r]) + gain)
        penalty_s = self._penalty(int(self.area[s]) - gain)
        rise = penalty_r + penalty_s - self.penalty[r] - self.penalty[s]
        if rise > HOPELESS + tolerance:
            return
        moved = p.sees[v].astype(np.int64) - p.sees[u]
        self.counts[r] += moved
        self.counts[s] -= moved
        self.owner[u], self.owner[v] = s, r
        loads = p._loads(self.counts > 0, self.owner[p.home])
        potential = self._potential(loads)
        rise += int((potential - self.potential).sum())
        if rise > tolerance:
            self.counts[r] -= moved
            self.counts[s] += moved
            self.owner[u], self.owner[v] = r, s
            return
        self.loads, self.potential = loads, potential
        self.area[r] += gain
        self.area[s] -= gain
        self.penalty[r], self.penalty[s] = penalty_r, penalty_s
        self.spares[r] += p.spare[v] - p.spare[u]
        self.spares[s] += p.spare[u] - p.spare[v]
        self.units[r][self.units[r].index(u)] = v
        self.units[s][self.units[s].index(v)] = u

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
