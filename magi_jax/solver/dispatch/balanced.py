"""Dispatch that weighs communication and balance: the default strategy.

Short searches compare a number of starting points (`starts`), and longer ones exchange units of the
best until the time is used up. The worst
rank's rows, received or sent, and the worst node's rows are brought down while no rank's area rises beyond
a limit. The same problem always gets the same answer. See docs/planner.md.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from magi_jax.solver.dispatch.bounds import lower_bounds
from magi_jax.solver.dispatch.effort import (
    ALWAYS_SEARCHED,
    AREA_LIMIT,
    EFFORTS,
    effort_of,
)
from magi_jax.solver.dispatch.numpy_placement import NumpyPlacement
from magi_jax.solver.dispatch.problem import Assignment, DispatchProblem
from magi_jax.solver.dispatch.regular import contiguous, zigzag
from magi_jax.solver.dispatch.runs import FEW_SLICES, runs
from magi_jax.solver.dispatch.score import Score, meets_bounds, score_of
from magi_jax.solver.dispatch.split_chunks import COARSE_SHARE, FINENESS
from magi_jax.solver.dispatch.starts import Site, dealt, greedy_starts, node_first_starts
from magi_jax.solver.dispatch.units import Units, fixed_units, make_units
from magi_jax.solver.dispatch.whole import WholeDocuments
from magi_jax.solver.engine import check_engine, compiled

# Starting points which cannot be mended in the time at hand are not tried.
MAX_START_IMBALANCE = 1.25
# Runs whose ranks receive more than so many times what they must are compared with chunks in any case.
FAR_FROM_BOUND = 3.0
# Rows of the worst rank over those of the mean rank, up to which rows cross alike at all edges.
ALIKE = 1.25
# Fixed time of a proposed exchange, in spans.
SPANS_OF_A_MOVE = 15
# Greedy passes pile travelling rows up on few ranks; it takes so many exchanges to spread them.
TRAVEL_MOVES = 24_000
PROBE_SEED, SEARCH_SEED, FINISH_SEED = 2, 3, 77


def balanced(problem: DispatchProblem) -> Assignment:
    """Places chunks so that the worst rank moves few rows and none computes much more than the mean.

    Raises:
        ValueError: ``ranks_per_node`` does not divide ``cp_size``, or ``effort`` or ``engine`` is
            unknown.
        ImportError: ``engine="compiled"`` and the extension module is not built.
    """
    per_node = node_size(problem)
    if problem.effort not in EFFORTS:
        raise ValueError(f"effort must be one of {sorted(EFFORTS)}, got {problem.effort!r}")
    make_placement = placement_maker(problem.engine)
    if problem.cp_size == 1 or not (len(problem.slices) or len(problem.travelling)):
        return contiguous(problem)
    if len(problem.edges) - 1 == problem.edges[-1] <= problem.cp_size:  # a token for each rank
        return contiguous(problem)
    placed_runs = _placed_runs(problem, per_node)
    if placed_runs and placed_runs.are_good_enough(problem):
        return placed_runs.placed
    found = [(placed_runs.cost, placed_runs.placed)] if placed_runs else []
    for fineness in range(len(FINENESS)):
        units = make_units(problem, fineness, problem.engine)
        placement = make_placement(units, problem.cp_size, per_node)
        starts = [_expand(strategy(problem), units, problem) for strategy in (contiguous, zigzag)]
        owner = _settled(starts, placement, units, problem)
        if owner is None:
            known = min((cost for cost, _ in found), default=np.inf)
            score, owner = _search(starts, placement, units, problem, known)
        else:
            score = score_of(placement.measure(owner), problem.cp_size)
        placed = Assignment(units.edges, owner[: len(units.chunk)].astype(np.int64))
        found.append((_final_cost(score, problem), placed))
        splittable = units.area.max() > COARSE_SHARE * units.area.sum() / problem.cp_size
        if score.imbalance <= AREA_LIMIT or not splittable:
            break
    return min(found, key=lambda each: each[0])[1]


class _Runs(NamedTuple):
    """The best placement of whole documents or long runs."""

    cost: float
    placed: Assignment
    score: Score
    units: Units

    def are_good_enough(self, problem: DispatchProblem) -> bool:
        """Whether to look no further."""
        effort, cp_size = effort_of(problem), problem.cp_size
        tokens = -(-int(problem.edges[-1]) // cp_size)
        most = int(self.units.need_rows.max())
        if self.move_little(problem) or meets_bounds(self.score, most, tokens, node_size(problem)):
            return True
        if self.cut_a_band(problem):
            return True
        if cp_size <= effort.searched_ranks or self.score.imbalance > AREA_LIMIT:
            return False
        bound = lower_bounds(self.units, cp_size, node_size(problem)).total_rows
        return self.score.total_rows <= FAR_FROM_BOUND * bound

    def cut_a_band(self, problem: DispatchProblem) -> bool:
        """Whether neighbouring rows of a mask of few slices are together and even, and rows cross alike at
        every edge between them: no rank sends or receives much more than one does in the mean.
        """
        is_even = self.score.imbalance <= effort_of(problem).area_limit
        is_alike = self.score.rank_rows * (problem.cp_size - 1) <= ALIKE * self.score.total_rows
        neighbours = np.array_equal(self.placed.owner, np.arange(problem.cp_size))
        return is_even and is_alike and neighbours and len(problem.slices) <= FEW_SLICES

    def move_little(self, problem: DispatchProblem) -> bool:
        """Whether rows cost little beside all else, or none moves."""
        effort, cp_size = effort_of(problem), problem.cp_size
        if not self.score.total_rows and self.score.imbalance <= effort.area_limit:
            return True
        few = effort.few_rows * int(problem.edges[-1]) / cp_size
        return cp_size > ALWAYS_SEARCHED and self.cost <= few


def _placed_runs(problem: DispatchProblem, per_node: int) -> _Runs | None:
    make_placement, best = placement_maker(problem.engine), None
    for placed in _placed_at_once(problem, per_node):
        units = fixed_units(problem, placed.edges, problem.engine)
        placement = make_placement(units, problem.cp_size, per_node)
        score = score_of(placement.measure(placed.owner.astype(np.int32)), problem.cp_size)
        found = _Runs(_final_cost(score, problem), placed, score, units)
        best = found if best is None or found.cost < best.cost else best
        if best.move_little(problem):
            break
    return best


def _placed_at_once(problem: DispatchProblem, per_node: int) -> Iterator[Assignment]:
    """Placements of documents that are whole on ranks, of long runs, and of documents whole in nodes, each
    made when it is asked for.
    """
    whole = WholeDocuments(problem, effort_of(problem).area_limit)
    if placed := whole.on_ranks():
        yield placed
    yield from runs(problem, effort_of(problem).run_orders)
    if placed := whole.in_nodes(per_node):
        yield placed


def _final_cost(score: Score, problem: DispatchProblem) -> float:
    """What finished placements are compared by."""
    effort = effort_of(problem)
    return score.cost(effort.area_limit, effort.overload_cost)


def node_size(problem: DispatchProblem) -> int:
    """Ranks of a node; all of them when the problem names no nodes or is smaller than one.

    Raises:
        ValueError: the ranks do not fill whole nodes.
    """
    per_node = problem.ranks_per_node
    if per_node is None or per_node >= problem.cp_size:
        return problem.cp_size
    if per_node < 1 or problem.cp_size % per_node:
        raise ValueError(
            f"cp_size={problem.cp_size} is not a multiple of ranks_per_node={per_node}"
        )
    return per_node


def placement_maker(engine: str) -> Callable[[Units, int, int], Any]:
    """What searches: the compiled planner, or its NumPy twin, which finds the same and is slow."""
    check_engine(engine)
    if engine == "numpy":
        return NumpyPlacement
    placement_problem = compiled().PlacementProblem

    def make(units: Units, num_ranks: int, ranks_per_node: int) -> Any:
        return placement_problem(
            units.area, units.size, units.spare, units.rows, units.span_ptr, units.need_ptr,
            units.needs, num_ranks, ranks_per_node,
        )  # fmt: skip

    return make


def _expand(assignment: Assignment, units: Units, problem: DispatchProblem) -> np.ndarray:
    """Owner of every unit when whole chunks are assigned; blanks fill the ranks that have room."""
    chunks = np.bincount(assignment.owner, minlength=problem.cp_size)
    blanks = np.repeat(np.arange(problem.cp_size), units.slots - chunks)
    return np.concatenate([assignment.owner[units.chunk], blanks]).astype(np.int32)


def _settled(
    starts: list[np.ndarray], placement: Any, units: Units, problem: DispatchProblem
) -> np.ndarray | None:
    """A regular placement that is balanced and as good as any can be for the worst rank and node."""
    most, tokens = int(units.need_rows.max()), units.slots * units.slot
    if most <= tokens:
        return None
    scores = [score_of(placement.measure(owner), problem.cp_size) for owner in starts]
    fit = [
        (score.total_rows, i)
        for i, score in enumerate(scores)
        if meets_bounds(score, most, tokens, node_size(problem))
    ]
    return starts[min(fit)[1]] if fit else None


def _search(
    starts: list[np.ndarray],
    placement: Any,
    units: Units,
    problem: DispatchProblem,
    known: float = np.inf,
) -> tuple[Score, np.ndarray]:
    """Probes all starting points, then searches from the best, unless that will not cost less than ``known``,
    the cost of another placement.
    """
    effort, cp_size = effort_of(problem), problem.cp_size
    mean_area = units.area.sum() / cp_size

    def refine(owner: np.ndarray, area: float, moves: int, seed: int, temperature: float):
        owner, *loads = placement.refine(
            owner,
            int(area * mean_area),
            moves,
            seed,
            effort.node_weight,
            temperature,
            effort.period,
        )
        return score_of(loads, cp_size), owner

    def cost(found: tuple[Score, np.ndarray]) -> float:
        return found[0].cost(effort.area_limit, effort.overload_cost)

    site = Site(units, cp_size, node_size(problem), placement_maker(problem.engine))
    regular = [
        start
        for start in starts
        if np.bincount(start, units.area, cp_size).max() <= MAX_START_IMBALANCE * mean_area
    ]
    starts = greedy_starts(site, placement, effort.passes) + dealt(site, placement)
    if effort.node_first:
        starts += node_first_starts(site, placement, starts, effort.period)
    area = effort.rounds[-1].area
    probes = [
        refine(start, area, effort.probe, PROBE_SEED, effort.probe_temperature)
        for start in regular + starts
    ]
    probes.sort(key=cost)
    if cost(probes[0]) > effort.hope * known:
        return probes[0]
    spans = np.diff(units.needs, axis=1).sum() / max(len(units.area), 1)
    moves = effort.work / (SPANS_OF_A_MOVE + spans) / effort.searches
    if len(problem.travelling):
        moves = max(moves, TRAVEL_MOVES)
    found = probes[:1]
    for placed in probes[: effort.searches]:
        for i, (area, share, temperature) in enumerate(effort.rounds):
            placed = refine(placed[1], area, int(moves * share), SEARCH_SEED + i, temperature)
        found.append(placed)
    best = min(reversed(found), key=cost)
    for i, (area, share, temperature) in enumerate(effort.finish):
        placed = refine(best[1], area, int(moves * share), FINISH_SEED + i, temperature)
        best = min(placed, best, key=cost)
    return best
