"""What placements are compared by: rows of the worst rank and node, and balance."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# A placement is as good as any when it is this close to its bounds.
SETTLED_IMBALANCE = 1.002
SETTLED_GAP = 1.001
# How much a whole sequence's rows, summed over ranks, count beside the worst rank's.
TOTAL_WEIGHT = 0.01
# How steeply imbalance beyond the limit raises the cost of a placement.
OVERLOAD_COST = 200.0


class Score(NamedTuple):
    """What a placement costs.

    Attributes:
        rank_rows, node_rows: rows that the worst rank receives or sends, and the worst node.
        total_rows: rows that all ranks receive.
        imbalance: largest area of a rank over the mean.
    """

    rank_rows: int
    node_rows: int
    total_rows: int
    imbalance: float

    def cost(self, area_limit: float, overload_cost: float = OVERLOAD_COST) -> float:
        """One number: rows, which imbalance beyond ``area_limit`` multiplies."""
        rows = self.rank_rows + self.node_rows + TOTAL_WEIGHT * self.total_rows
        return (rows + 1) * (1 + overload_cost * max(self.imbalance - area_limit, 0.0))


def score_of(loads: Sequence[np.ndarray], cp_size: int) -> Score:
    """The score of loads as a placement is measured to have: rows of ranks and nodes, and areas ``[cp]``."""
    rows, area = loads
    return Score(
        rank_rows=int(rows[: 2 * cp_size].max()),
        node_rows=int(rows[2 * cp_size :].max()),
        total_rows=int(rows[:cp_size].sum()),
        imbalance=float(area.max() / area.mean()),
    )


def meets_bounds(score: Score, most: int, tokens: int, per_node: int) -> bool:
    """Whether a placement is balanced, and moves as few rows to the worst rank and node as any can.

    Args:
        score: of the placement.
        most: rows that some row or unit sees.
        tokens: of a rank.
        per_node: ranks of a node.
    """
    rank_bound, node_bound = most - tokens, max(most - tokens * per_node, 0)
    return (
        rank_bound > 0
        and score.imbalance <= SETTLED_IMBALANCE
        and score.rank_rows <= SETTLED_GAP * rank_bound
        and score.node_rows <= SETTLED_GAP * node_bound
    )
