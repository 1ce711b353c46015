"""Travelling queries and stages of their own for the backward pass are exact in both directions."""

import dataclasses

import jax
import numpy as np
import pytest
from attention_problem import (
    Problem,
    check,
    dispatched,
    expected,
    expected_batch,
    make_mesh,
    random_problem,
    run_with,
)

from magi_jax import masks
from magi_jax.parallel import DistOptions, dispatch, dist_attention
from magi_jax.plan import PlanConfig, make_plan, stack_plans
from magi_jax.testing import cases, hlo

SEQ_LEN = 71
BLOCK = masks.causal(SEQ_LEN) | masks.global_rows(SEQ_LEN, rows=(30, 33))
CONFIG = PlanConfig(
    chunk_size=4, overlap=(2, 1), roll_shifts=(), travelling=((30, 33), (60, 71)), tile_size=128
)


@pytest.mark.parametrize(("cp_size", "cap"), [(2, None), (8, 2.0)])
def test_every_kind_of_mask_in_one_program(cp_size, cap, rng):
    named = {"block": BLOCK, "empty": masks.empty(SEQ_LEN), "full": masks.full(SEQ_LEN)}
    named |= {f"random_{i}": cases.random_mask(rng, SEQ_LEN, SEQ_LEN, 12) for i in range(4)}
    plans = [make_plan(mask, cp_size, CONFIG) for mask in named.values()]
    plans.append(make_plan(BLOCK, cp_size, dataclasses.replace(CONFIG, travelling="never")))
    assert plans[0].report().travel_area.any()
    assert plans[-1].travel is None
    spec = plans[0].spec.union(*(plan.spec for plan in plans[1:]))
    run = run_with(make_mesh(cp=cp_size), logits_soft_cap=cap)
    for mask, plan in zip([*named.values(), BLOCK], plans, strict=True):
        problem, padded = random_problem(rng, SEQ_LEN), plan.pad_to(spec)
        answer = run(dispatched(problem, padded), padded)
        check(answer, padded, expected(problem, mask, logits_soft_cap=cap))
    assert run._cache_size() == 1


@pytest.mark.parametrize("options", [{"keep_remote_kv": True}, {"reduce_dtype": "float32"}])
def test_options(options, rng):
    plan = make_plan(BLOCK, 4, dataclasses.replace(CONFIG, overlap=(1, 3)))
    assert (len(plan.comm), len(plan.backward.comm)) == (1, 3)
    problem = random_problem(rng, SEQ_LEN, heads=6, kv_heads=1)
    run = run_with(make_mesh(cp=4), options=DistOptions(**options))
    check(run(dispatched(problem, plan), plan), plan, expected(problem, BLOCK))


def test_batches_share_a_plan_or_have_their_own(rng):
    mesh = make_mesh(dp=2, cp=4)
    mask_of = [BLOCK, masks.causal(SEQ_LEN)]
    both = [make_plan(mask, 4, CONFIG) for mask in mask_of]
    spec = both[0].spec.union(both[1].spec)
    stacked = stack_plans([plan.pad_to(spec) for plan in both])
    problem = random_problem(rng, SEQ_LEN, lead=(2,))
    run = run_with(mesh, options=DistOptions(batch_axes="dp"))
    shared = dispatched(problem, both[0], axis=1)
    check(run(shared, both[0]), both[0], expected_batch(problem, [BLOCK] * 2), axis=1)
    own = Problem(**dispatch(problem.rows, stacked, axis=1), sinks=problem.sinks)
    answer = run(own, stacked)
    check(answer, stacked, expected_batch(problem, mask_of), axis=1)


def test_the_largest_logit_counts_visitors(rng):
    plan = make_plan(BLOCK, 4, CONFIG)
    problem = random_problem(rng, SEQ_LEN)
    moved = dispatched(problem, plan)
    mesh = make_mesh(cp=4)
    _, found = jax.jit(
        lambda q, k, v: dist_attention(q, k, v, plan, mesh=mesh, return_max_logits=True)
    )(moved.q, moved.k, moved.v)
    keys = np.repeat(problem.k, 2, axis=1)
    logits = np.einsum("tnh,snh->nts", problem.q, keys) * 8**-0.5
    wanted = np.where(BLOCK.dense(), logits, -np.inf).max(axis=(1, 2))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_without_travellers_there_is_no_operation_for_them(rng):
    mesh = make_mesh(cp=4)
    plans = [
        make_plan(BLOCK, 4, dataclasses.replace(CONFIG, overlap=1, travelling=option))
        for option in ("never", CONFIG.travelling)
    ]
    counts = []
    for plan in plans:
        moved = dispatched(random_problem(rng, SEQ_LEN), plan)
        forward = jax.jit(lambda q, k, v, p: dist_attention(q, k, v, p, mesh=mesh))
        text = forward.lower(moved.q, moved.k, moved.v, plan).compile().as_text()
        counts.append(len(hlo.collectives(text)))
    # One cast of k and v; with travellers q goes out, and out and lse return.
    assert counts == [2, 5]
