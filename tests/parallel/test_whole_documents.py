"""Plans in which no key crosses ranks have no remote stage, and are exact alone and in programs of others."""

import numpy as np
import pytest
from attention_problem import check, dispatched, expected, make_mesh, random_problem, run_with

from magi_jax import masks
from magi_jax.parallel import DistOptions
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.testing import cases

LENGTHS = [
    5,
    12,
    7,
    9,
    11,
    3,
    8,
    6,
    10,
    4,
    13,
    2,
    7,
    5,
    9,
    1,
    6,
    10,
    3,
    4,
    8,
    2,
    6,
    9,
    1,
    7,
    5,
    5,
    11,
    1,
    3,
    3,
]
SEQ_LEN = sum(LENGTHS)
CONFIG = PlanConfig(chunk_size=4, roll_shifts=(), travelling="never")


def shuffled(rng):
    return masks.varlen(rng.permutation(LENGTHS), causal=True)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_documents_that_fill_the_ranks_need_no_stage(cp_size, rng):
    mask = shuffled(rng)
    plan = make_plan(mask, cp_size, CONFIG)
    report = plan.report(mask=mask)
    assert plan.comm == plan.backward_stages.comm == ()
    assert plan.late is plan.backward_stages.late is None
    assert report.traffic.sum() == 0
    assert np.ptp(report.tokens) == 0
    problem = random_problem(rng, SEQ_LEN)
    for keep in (False, True):
        run = run_with(make_mesh(cp=cp_size), options=DistOptions(keep_remote_kv=keep))
        check(run(dispatched(problem, plan), plan), plan, expected(problem, mask))


def test_in_one_program_with_masks_that_need_stages(rng):
    whole = shuffled(rng)
    named = [whole, masks.causal(SEQ_LEN), cases.random_mask(rng, SEQ_LEN, SEQ_LEN, 9)]
    plans = [make_plan(mask, 4, CONFIG) for mask in named]
    spec = plans[0].spec.union(plans[1].spec, plans[2].spec)
    assert spec == plans[2].spec.union(plans[1].spec.union(plans[0].spec))
    run = run_with(make_mesh(cp=4))
    again = make_plan(whole, 4, CONFIG, spec.scaled(2.0)), make_plan(whole, 4, CONFIG, spec)
    padded = [plan.pad_to(spec) for plan in plans]
    for mask, plan in zip([*named, whole], [*padded, again[1]], strict=True):
        problem = random_problem(rng, SEQ_LEN)
        check(run(dispatched(problem, plan), plan), plan, expected(problem, mask))
    assert run._cache_size() == 1
    assert again[0].spec == spec.scaled(2.0)


def test_a_spec_without_stages_says_so(rng):
    mask = shuffled(rng)
    spec = make_plan(mask, 4, CONFIG).spec
    assert make_plan(mask, 4, CONFIG, spec).spec == spec
    with pytest.raises(ValueError, match="no remote stage"):
        make_plan(masks.causal(SEQ_LEN), 4, CONFIG, spec.scaled(8.0))


def test_a_number_that_is_asked_for_stays(rng):
    plan = make_plan(shuffled(rng), 4, PlanConfig(chunk_size=4, overlap=2, roll_shifts=()))
    assert len(plan.comm) == 2
