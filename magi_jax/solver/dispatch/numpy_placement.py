"""The search of the compiled planner in NumPy: slower by two orders, and move for move the same.

It prices an exchange by measuring both ranks anew, where the compiled search updates counts, so that each
checks the other. See ``xla_ffi/solver``.
"""

import collections

import numpy as np

from magi_jax.solver.dispatch.numpy_search import FIXED_POINT, RESCALE_PERIOD, Search
from magi_jax.solver.dispatch.units import Units

RANK_OVERLOAD, NODE_OVERLOAD = 100.0, 20.0


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
        return self.loads(needed, owner[self.home]), area

    def loads(self, needed: np.ndarray, home: np.ndarray) -> np.ndarray:
        """Loads, given which spans each rank needs ``[R, V]`` and who owns each span ``[V]``."""
        by_node = np.any(needed.reshape(self.num_nodes, self.per_node, -1), axis=1)
        loads = []
        for groups, owner in ((needed, home), (by_node, home // self.per_node)):
            far = groups & (np.arange(len(groups))[:, None] != owner)
            sent = np.bincount(owner, weights=far.sum(axis=0) * self.rows, minlength=len(groups))
            loads += [far @ self.rows, sent.astype(np.int64)]
        return np.concatenate(loads)

    def greedy(
        self, order: np.ndarray, capacity: tuple, weights: tuple, node: np.ndarray | None = None
    ) -> np.ndarray | None:
        """Owner of each unit after one pass in ``order``, each in its ``node`` if that is given; None when
        a unit finds no room. See ``xla_ffi/solver/greedy.cc``.
        """
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
            if node is not None:
                fits = fits & (node_of == node[unit])
            if not fits.any():
                return None
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

    def deal(self, capacity: tuple) -> np.ndarray | None:
        """Owner of each unit, dealt out in the order of the sequence, or None; see
        ``xla_ffi/solver/deal.cc``.
        """
        tokens, slot, *_ = capacity
        ranks = self.num_ranks
        owner = np.full(len(self.area), -1, np.int32)
        spares = np.flatnonzero(self.spare)[::-1]
        if len(spares) > ranks:
            return None
        owner[spares] = ranks - 1 - np.arange(len(spares))
        room = tokens - np.bincount(owner[spares], self.size[spares], ranks).astype(np.int64)
        area = np.bincount(owner[spares], self.area[spares], ranks).astype(np.int64)
        left = int(self.area.sum())
        is_heavy = self.area > left / ranks / tokens * self.size
        piles = [
            [
                collections.deque(np.flatnonzero(~self.spare.astype(bool) & (is_heavy == h) & p))
                for p in (self.size == slot, self.size < slot)
            ]
            for h in (False, True)
        ]

        def first(pile: list, parts_only: bool) -> int:
            heads = [queue[0] for queue in (pile[1:] if parts_only else pile) if queue]
            return int(min(heads, default=-1))

        for rank in range(ranks):
            target = left / (ranks - rank)
            while room[rank] > 0:
                light, heavy = (first(pile, room[rank] % slot != 0) for pile in piles)
                if light < 0 and heavy < 0:
                    return None
                takes_heavy = light < 0
                if light >= 0 and heavy >= 0:
                    wanted = (target - area[rank]) / room[rank]
                    of_light, of_heavy = (self.area[u] / self.size[u] for u in (light, heavy))
                    takes_heavy = wanted >= (of_light + of_heavy) / 2
                unit = heavy if takes_heavy else light
                piles[int(takes_heavy)][int(self.size[unit] < slot)].popleft()
                owner[unit] = rank
                room[rank] -= self.size[unit]
                area[rank] += self.area[unit]
            left -= int(area[rank])
        return owner

    def refine(
        self,
        owner: np.ndarray,
        area_limit: int,
        moves: int,
        seed: int,
        node_weight: float,
        temperature: float,
        period: int = 0,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Owner of each unit after ``moves`` proposed exchanges, then its `measure`; see
        ``xla_ffi/solver/refine.cc``.
        """
        if not len(self.area) or self.num_ranks < 2:
            return owner.copy(), *self.measure(owner)
        search = Search(self, owner, area_limit, seed, node_weight)
        for k in range(moves):
            if k % RESCALE_PERIOD == 0:
                search.rescale()
            propose = search.double_step if period > 0 and k % period == 0 else search.step
            propose(int(temperature * (1.0 - k / moves) * FIXED_POINT))
        return search.owner, search.loads, search.area
