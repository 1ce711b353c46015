"""Effort high: the plan that moves fewer rows, unless that of a fast search is predicted to be faster."""

import numpy as np
import pytest

from magi_jax import masks
from magi_jax.plan import PlanConfig, build, make_plan
from magi_jax.solver import dispatch
from magi_jax.solver.cost.model import CostModel

# Kernels so slow that their balance decides.
MODEL = CostModel(
    forward_tflops=((1.0, 1.0),),
    backward_tflops=((1.0, 1.0),),
    latency_us=1.0,
    launch_us=1.0,
    backward_launch_us=1.0,
)
HIGH = PlanConfig(chunk_size=16, effort="high", cost_model=MODEL)
MASK = masks.causal(256)


def layout_of(owner):
    return dispatch.make_layout(
        dispatch.Assignment(np.arange(0, 257, 16), np.asarray(owner, np.int64)), 4
    )


EVEN = layout_of([0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0])
NEARLY = layout_of([0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 0, 1, 0])
SKEWED = layout_of(np.repeat(range(4), 4))


def owners(plan):
    """Owner of every token."""
    owner = np.empty(256, int)
    for rank, positions in enumerate(plan.positions):
        owner[positions[positions >= 0]] = rank
    return owner.tolist()


def plan_with(layouts, monkeypatch, spec=None):
    monkeypatch.setattr(build, "_layouts", lambda problem, strategy: list(layouts))
    return make_plan(MASK, 4, HIGH, spec)


def predicted_us(layout, monkeypatch):
    return plan_with([layout], monkeypatch).report(MODEL).predicted_us


def test_the_faster_of_two_layouts_is_taken(monkeypatch):
    slow, fast = (predicted_us(layout, monkeypatch) for layout in (SKEWED, EVEN))
    assert fast < build.CLEARLY * slow
    for layouts in ([SKEWED, EVEN], [EVEN, SKEWED]):
        plan = plan_with(layouts, monkeypatch)
        assert plan.report(MODEL).predicted_us == fast
        assert plan.planning_ms > 0


def test_the_first_of_two_that_are_about_as_fast_is_taken(monkeypatch):
    times_us = [predicted_us(layout, monkeypatch) for layout in (EVEN, NEARLY)]
    assert times_us[0] != times_us[1]
    monkeypatch.setattr(build, "CLEARLY", 0.99 * min(times_us) / max(times_us))
    for layouts in ([EVEN, NEARLY], [NEARLY, EVEN]):
        first = plan_with(layouts[:1], monkeypatch)
        assert owners(plan_with(layouts, monkeypatch)) == owners(first)
    monkeypatch.setattr(build, "CLEARLY", 1.0)
    chosen = {tuple(owners(plan_with(x, monkeypatch))) for x in ([EVEN, NEARLY], [NEARLY, EVEN])}
    assert len(chosen) == 1


def test_of_two_layouts_one_may_not_fit_a_spec(monkeypatch):
    spec = plan_with([SKEWED], monkeypatch).spec
    for layouts in ([SKEWED, EVEN], [EVEN, SKEWED]):
        assert owners(plan_with(layouts, monkeypatch, spec)) == np.repeat(range(4), 64).tolist()
    with pytest.raises(ValueError, match="spec"):
        plan_with([EVEN, NEARLY], monkeypatch, spec)


def test_nodes_are_those_of_the_spec():
    mask = masks.varlen(np.random.default_rng(0).integers(1, 900, 20), causal=True)
    nodes = PlanConfig(chunk_size=16, ranks_per_node=2, two_level=True, overlap=2)
    spec = make_plan(mask, 8, nodes).spec.scaled(8.0)
    plan = make_plan(mask, 8, PlanConfig(chunk_size=16, effort="high", overlap=2), spec)
    assert plan.spec == spec


@pytest.mark.parametrize("kind", [{"causal": True}, {}])
def test_high_effort_is_predicted_no_slower_than_fast(kind):
    lengths = np.random.default_rng(5).integers(20, 700, 24)
    mask = masks.varlen(lengths, **kind)
    plans = {
        effort: make_plan(
            mask, 8, PlanConfig(chunk_size=128, ranks_per_node=4, effort=effort, cost_model=MODEL)
        )
        for effort in ("fast", "high")
    }
    fast_us, high_us = (plans[e].report(MODEL, 4).predicted_us for e in ("fast", "high"))
    assert high_us * build.CLEARLY <= fast_us
