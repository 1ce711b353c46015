"""Starting points of the balanced dispatcher: owners of all units, to be improved by exchanges.

Greedy passes place heavy units first and weigh area against key rows. Dealing takes units in the order of
the sequence, so that every rank and every node holds few runs of it. Where there are nodes, both are tried
for whole nodes first, improved by exchanges between nodes, and then filled in rank by rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from magi_jax.solver.dispatch.units import Units

PlacementMaker = Callable[[Units, int, int], Any]


class GreedyWeights(NamedTuple):
    """What a greedy pass charges for key rows, in means of a rank; area costs 1.

    Attributes:
        volume: a row that is new to the rank.
        held: a row that the rank holds already, over ``volume``: spreads rows over ranks.
        sent: a row that the rank has to send already, over ``volume``.
        node: a row that is new to the node, over ``volume``.
        node_held: a row that the node holds already, over ``node``.
        area_limit: area of a rank over the mean beyond which the cost rises steeply.
    """

    volume: float
    held: float
    sent: float
    node: float
    node_held: float
    area_limit: float = 1.01


GREEDY = (
    GreedyWeights(volume=0.1, held=0.3, sent=0.1, node=1.0, node_held=0.3),
    GreedyWeights(volume=0.1, held=0.3, sent=0.0, node=0.3, node_held=0.3),
    GreedyWeights(volume=0.1, held=0.3, sent=0.3, node=0.3, node_held=0.3),
    GreedyWeights(volume=0.3, held=0.0, sent=0.1, node=1.0, node_held=0.0),
    GreedyWeights(volume=0.03, held=0.3, sent=0.1, node=1.0, node_held=0.3),
)
# Passes whose nodes are good starting points for nodes, and passes that fill nodes well.
NODES_FROM, FILL_WITH = (0, 1, 3), (0, 1, 4)
BEST_NODES = 3
# Searches of nodes: area of a node over the mean, exchanges, temperature.
NODE_ROUNDS = ((1.02, 40_000, 0.2), (1.002, 60_000, 0.05))
NODE_AREA_LIMIT, NODE_OVERLOAD_COST = 1.003, 50.0
NODE_SEED = 31


class Site(NamedTuple):
    """Units and where they may go.

    Attributes:
        units: what is placed.
        num_ranks: ranks.
        ranks_per_node: ranks of a node.
        make_placement: makes the placement problem of some units, groups and nodes of groups.
    """

    units: Units
    num_ranks: int
    ranks_per_node: int
    make_placement: PlacementMaker

    @property
    def capacity(self) -> tuple[int, int, int, float]:
        """Tokens of a rank, tokens of a chunk, places for parts of chunks, area of a light chunk."""
        units = self.units
        return units.slots * units.slot, units.slot, units.split_chunks, units.light_area

    @property
    def order(self) -> np.ndarray:
        """Units in the order of greedy passes: those of short places first, then by falling area."""
        return np.lexsort((-self.units.area, -self.units.spare)).astype(np.int32)


def greedy_starts(
    site: Site, placement: Any, picked: Sequence[int] = range(len(GREEDY))
) -> list[np.ndarray]:
    """One placement for each of those of `GREEDY` that are ``picked``."""
    order, capacity = site.order, site.capacity
    starts = [placement.greedy(order, capacity, tuple(GREEDY[i])) for i in picked]
    assert all(owner is not None for owner in starts), "all units fit where any rank may take them"
    return starts


def dealt(site: Site, placement: Any) -> list[np.ndarray]:
    """The dealt placement, unless parts of chunks do not fill their places."""
    owner = placement.deal(site.capacity)
    return [] if owner is None else [owner]


def node_first_starts(
    site: Site, placement: Any, starts: list[np.ndarray], period: int
) -> list[np.ndarray]:
    """Placements whose nodes were settled before their ranks.

    Args:
        site: units and where they may go.
        placement: of the ranks.
        starts: placements whose nodes are tried: those of `GREEDY`, then others.
        period: of exchanges in pairs.
    """
    per_node, num_nodes = site.ranks_per_node, site.num_ranks // site.ranks_per_node
    if num_nodes == 1:
        return []
    tokens, *rest = site.capacity
    # Several units may hold fewer tokens than their place in a node, not in a rank.
    units = site.units._replace(spare=np.zeros_like(site.units.spare))
    groups = site.make_placement(units, num_nodes, 1)
    picked = [starts[i] for i in NODES_FROM] + starts[len(GREEDY) :]
    nodes = [(owner // per_node).astype(np.int32) for owner in picked]
    order, capacity = site.order, (tokens * per_node, *rest)
    passes = (groups.greedy(order, capacity, tuple(weights)) for weights in GREEDY)
    nodes += [node for node in passes if node is not None]
    mean_area = units.area.sum() / num_nodes
    found = []
    for place, node in enumerate(nodes):
        for i, (area, moves, temperature) in enumerate(NODE_ROUNDS):
            node, rows, areas = groups.refine(
                node, int(area * mean_area), moves, NODE_SEED + i, 1.0, temperature, period
            )
        over = max(float(areas.max() / areas.mean()) - NODE_AREA_LIMIT, 0.0)
        cost = float(rows[: 2 * num_nodes].max()) * (1 + NODE_OVERLOAD_COST * over)
        found.append((cost, place, node))
    found.sort(key=lambda each: each[:2])
    filled = []
    for _, _, node in found[:BEST_NODES]:
        for i in FILL_WITH:
            filled.append(placement.greedy(order, site.capacity, tuple(GREEDY[i]), node))
    # A pass may end with units that no rank of their node has a place for.
    return [owner for owner in filled if owner is not None]
