"""How long the search for a balanced placement takes: the settings behind ``effort``."""

from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from magi_jax.solver.dispatch.problem import DispatchProblem
from magi_jax.solver.dispatch.runs import ALL_ORDERS
from magi_jax.solver.dispatch.starts import GREEDY

# Area of a rank over the mean beyond which chunks are split more finely.
AREA_LIMIT = 1.014
# Up to so many ranks chunks are compared with long runs whatever those move: two ranks cut one document at
# most, and where it is cut decides how many rows move.
ALWAYS_SEARCHED = 2


class Round(NamedTuple):
    """A part of a search.

    Attributes:
        area: of a rank over the mean, beyond which it is penalised.
        share: of the proposed exchanges.
        temperature: rise of the potential that is accepted at first.
    """

    area: float
    share: float
    temperature: float


class Effort(NamedTuple):
    """How long to search.

    Attributes:
        passes: greedy passes of `starts.GREEDY` that make starting points.
        node_first: whether others are made from nodes that are settled first.
        probe: proposed exchanges for each starting point.
        probe_temperature: of these.
        searches: of the best starting points, how many are searched.
        work: proposed exchanges of all searches, times the spans that one touches.
        area_limit: imbalance from which on a placement counts as worse.
        node_weight: loads of nodes against those of ranks.
        period: every so many proposals is a pair of exchanges, of which the second mends the balance
            after the first.
        rounds: of each search. The first may be loose: heavy units find their places, and balance comes
            later.
        finish: further rounds of the best that was found.
        overload_cost: how steeply imbalance beyond the limit raises the cost of a placement.
        hope: a search starts where its best starting point costs less than so many times what is known.
        few_rows: runs whose rows are at most so many shares of a rank are taken without looking further,
            beyond `ALWAYS_SEARCHED` ranks.
        searched_ranks: beyond so many ranks balanced runs are taken, unless they are far from their bound:
            chunks, of which a rank has as few as ever, are hardly better there.
        run_orders: orders of the piles of `runs.runs` that are tried.
    """

    passes: tuple[int, ...]
    node_first: bool
    probe: int
    probe_temperature: float
    searches: int
    work: int
    area_limit: float
    node_weight: float
    period: int
    rounds: tuple[Round, ...]
    finish: tuple[Round, ...]
    overload_cost: float
    hope: float
    few_rows: float
    searched_ranks: float
    run_orders: tuple[tuple[str, str], ...]


EFFORTS = MappingProxyType(
    {
        "fast": Effort(
            passes=(0, 1, 4), node_first=False, probe=400, probe_temperature=0.0, searches=1,
            work=200_000, area_limit=AREA_LIMIT, node_weight=1.5, period=8,
            rounds=(Round(1.02, 0.5, 0.1), Round(1.01, 0.5, 0.03)), finish=(), overload_cost=200.0,
            hope=1.25, few_rows=1.0, searched_ranks=48, run_orders=ALL_ORDERS[4::-2],
        ),
        "high": Effort(
            passes=tuple(range(len(GREEDY))), node_first=True, probe=30_000, probe_temperature=0.02,
            searches=3, work=300_000_000, area_limit=1.0048, node_weight=1.25, period=6,
            rounds=(Round(1.03, 0.45, 0.3), Round(1.0035, 0.55, 0.1)),
            finish=(Round(1.0042, 0.5, 0.1), Round(1.0042, 0.5, 0.03)), overload_cost=2000.0,
            hope=2.0, few_rows=0.0, searched_ranks=np.inf, run_orders=ALL_ORDERS,
        ),
    }
)  # fmt: skip


# Two ranks hide what moves between them behind their own work, as a rule, but not what one has to do more.
AREA_LIMIT_OF_TWO = 1.004
ROUNDS_OF_TWO = (Round(1.01, 0.5, 0.1), Round(1.003, 0.5, 0.03))


def effort_of(problem: DispatchProblem) -> Effort:
    """How long to search for the placement of a problem whose ``effort`` is one of `EFFORTS`."""
    effort = EFFORTS[problem.effort]
    if problem.effort == "fast" and problem.cp_size <= ALWAYS_SEARCHED:
        return effort._replace(area_limit=AREA_LIMIT_OF_TWO, rounds=ROUNDS_OF_TWO)
    return effort
