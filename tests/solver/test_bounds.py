"""Lower bounds, exact optima and what the dispatcher reaches, in this order."""

import numpy as np
import pytest
from exact_dispatch import least_rank_rows

from magi_jax import masks
from magi_jax.solver import dispatch
from magi_jax.solver.dispatch import DispatchProblem, bounds
from magi_jax.solver.dispatch.balanced import balanced, placement_maker
from magi_jax.solver.dispatch.strategies import STRATEGIES
from magi_jax.solver.dispatch.units import fixed_units, make_units
from magi_jax.testing.cases import mask_cases

SMALL = {
    "documents": masks.varlen([40, 25, 60, 35, 32], causal=True),
    "full documents": masks.varlen([50, 46, 66, 30]),
    "window": masks.local(192, window=(30, 0)),
    "blocks": masks.uniform_block_causal([100, 92], 20),
    "causal": masks.causal(192),
}


def problem_of(mask, chunk_size, cp_size, **options):
    edges = dispatch.chunk_edges(mask.q_len, chunk_size)
    return DispatchProblem(mask.slices, edges, cp_size, **options)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_bound_optimum_and_found(name):
    problem = problem_of(SMALL[name], 16, 3)
    units = make_units(problem)
    assert units.split_chunks == 0
    placement = placement_maker("compiled")(units, 3, 3)
    answer = balanced(problem)
    cut = fixed_units(problem, answer.edges)
    found, area = placement_maker("compiled")(cut, 3, 3).measure(answer.owner.astype(np.int32))
    limit = max(1.015 * area.mean(), area.max())
    optimum, owner = least_rank_rows(units, 3, limit)
    best, _ = placement.measure(owner)
    assert best[:6].max() == optimum, "the program counts rows as the placement does"
    bound = bounds.lower_bounds(units, 3, 3, limit / area.mean())
    assert bound.rank_rows <= optimum
    if set(answer.edges) <= set(units.edges):
        assert optimum <= found[:6].max()
    assert found[:6].max() <= 1.35 * optimum


@pytest.mark.parametrize("name", sorted(mask_cases(384)))
def test_no_placement_beats_the_bounds(name):
    mask = mask_cases(384)[name]
    if mask.q_len != mask.k_len:
        return
    problem = problem_of(mask, 16, 8, ranks_per_node=4)
    units = make_units(problem)
    placement = placement_maker("compiled")(units, 8, 4)
    order = np.lexsort((-units.area, -units.spare)).astype(np.int32)
    capacity = (units.slots * units.slot, units.slot, units.split_chunks, units.light_area)
    rng = np.random.default_rng(len(name))
    for _ in range(20):
        weights = (*rng.uniform(0, 1, 5), 1.01)
        rows, area = placement.measure(placement.greedy(order, capacity, weights))
        imbalance = area.max() / area.mean() if area.any() else 1.0
        bound = bounds.lower_bounds(units, 8, 4, imbalance)
        assert bound.rank_rows <= rows[:16].max()
        assert bound.node_rows <= rows[16:18].max()
        assert bound.total_rows <= rows[:8].sum()
        assert bound.imbalance <= imbalance + 1e-12


def test_bounds_are_attained_where_the_answer_is_known():
    full = make_units(problem_of(masks.full(1024), 16, 8))
    assert bounds.lower_bounds(full, 8, 8).rank_rows == 1024 - 128
    heavy = masks.global_rows(1024, rows=(0, 1))
    assert bounds.lower_bounds(make_units(problem_of(heavy, 1, 8)), 8, 8).imbalance == 8.0


def test_gap():
    assert bounds.gap(150, 100) == 0.5
    assert bounds.gap(0, 0) == 0.0
    assert bounds.gap(1, 0) == float("inf")


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_bounds_of_a_report_hold_for_every_strategy(name, strategy):
    """Units that are cut where the answer is cut as well: the answer is one of their placements."""
    problem = problem_of(SMALL[name], 16, 4, ranks_per_node=2)
    answer = STRATEGIES[strategy](problem)
    measured = fixed_units(problem, answer.edges)
    placement = placement_maker("compiled")(measured, 4, 2)
    rows, area = placement.measure(answer.owner.astype(np.int32))
    edges = np.union1d(dispatch.chunk_edges(192, 4), answer.edges)
    tokens = np.bincount(answer.owner, np.diff(answer.edges), 4)
    units = fixed_units(problem, edges)._replace(slot=int(tokens.max()), slots=1)
    bound = bounds.lower_bounds(units, 4, 2, area.max() / area.mean())
    assert bound.rank_rows <= rows[:8].max()
    assert bound.node_rows <= rows[8:10].max()
    assert bound.total_rows <= rows[:4].sum()
    assert bound.imbalance <= area.max() / area.mean() + 1e-12
