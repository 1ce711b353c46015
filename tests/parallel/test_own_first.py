"""Some queries see own keys before the first remote stage of a backward pass: exact, in any program."""

import dataclasses

import numpy as np
import pytest
from attention_problem import check, dispatched, expected, make_mesh, random_problem, run_with

from magi_jax import masks
from magi_jax.masks import bands
from magi_jax.parallel import DistOptions
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.solver.cost.model import CostModel
from magi_jax.testing import cases

SEQ_LEN = 71
# Another call costs nothing, and a fetch takes less than it.
MODEL = CostModel(link_gbps=2e3, backward_launch_us=0.0, latency_us=0.0)
CONFIG = PlanConfig(
    chunk_size=4, tile_size=4, roll_shifts=(), travelling="never", overlap="auto", cost_model=MODEL
)


@pytest.fixture
def plan():
    plan = make_plan(masks.causal(SEQ_LEN), 2, CONFIG)
    assert plan.backward is not None
    assert plan.backward.first is not None
    assert plan.backward.comm
    return plan


def test_tables_have_every_cell_once(plan):
    stages = plan.backward
    tables = [stages.first, *stages.calc]
    area = [bands.area(np.asarray(t.slices, np.int64).reshape(-1, 6)).sum() for t in tables]
    assert min(area) > 0
    assert sum(area) == masks.causal(SEQ_LEN).area
    half = plan.spec.local_len // 2 // plan.spec.tile_size * plan.spec.tile_size
    assert np.asarray(stages.first.slices)[..., 1].max() <= half
    report = plan.report()
    without = dataclasses.replace(plan, backward=dataclasses.replace(stages, first=None))
    assert report.predicted_us > without.report().predicted_us


def test_every_kind_of_mask_in_one_program(plan, rng):
    named = {"causal": masks.causal(SEQ_LEN), "empty": masks.empty(SEQ_LEN)}
    named |= {"full": masks.full(SEQ_LEN), "window": masks.local(SEQ_LEN, window=(6, 0))}
    named |= {f"random_{i}": cases.random_mask(rng, SEQ_LEN, SEQ_LEN, 12) for i in range(2)}
    spec = plan.spec.union(*(make_plan(mask, 2, CONFIG).spec for mask in named.values())).scaled(2)
    run = run_with(make_mesh(cp=2))
    for mask in named.values():
        problem, other = random_problem(rng, SEQ_LEN), make_plan(mask, 2, CONFIG, spec=spec)
        check(run(dispatched(problem, other), other), other, expected(problem, mask))
    assert run._cache_size() == 1


@pytest.mark.parametrize("keep", [False, True])
def test_beside_plans_of_other_ways(plan, keep, rng):
    """Late queries, and stages before which nothing comes; kept keys, for which nothing has to come first."""
    others = [dataclasses.replace(CONFIG, overlap=way) for way in ("late", (1, 2))]
    plans = [plan, *(make_plan(masks.causal(SEQ_LEN), 2, other) for other in others)]
    spec = plans[0].spec.union(*(each.spec for each in plans[1:]))
    assert spec.backward.first is not None
    assert spec.backward.late is not None
    run = run_with(make_mesh(cp=2), options=DistOptions(keep_remote_kv=keep))
    for each in plans:
        problem, padded = random_problem(rng, SEQ_LEN), each.pad_to(spec)
        answer = run(dispatched(problem, padded), padded)
        check(answer, padded, expected(problem, masks.causal(SEQ_LEN)))
    assert run._cache_size() == 1


def test_more_ranks_have_none():
    plan = make_plan(masks.causal(SEQ_LEN), 4, CONFIG)
    assert plan.backward_stages.first is None
