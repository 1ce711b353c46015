"""Late queries are exact in both directions, alone and in programs that have stages too."""

import dataclasses

import jax
import jax.numpy as jnp
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
from magi_jax.solver.cost.model import CostModel
from magi_jax.testing import cases, hlo

SEQ_LEN = 71
WINDOW = masks.local(SEQ_LEN, window=(6, 0))
CONFIG = PlanConfig(chunk_size=4, overlap="late", roll_shifts=(), travelling="never", tile_size=128)


@pytest.mark.parametrize(("cp_size", "cap", "tile_size"), [(2, None, 128), (8, 2.0, 4)])
def test_every_kind_of_mask_in_one_program(cp_size, cap, tile_size, rng):
    """The program also has stages and travelling queries, which late plans leave empty."""
    config = dataclasses.replace(CONFIG, tile_size=tile_size)
    named = {"window": WINDOW, "empty": masks.empty(SEQ_LEN), "full": masks.full(SEQ_LEN)}
    named |= {f"random_{i}": cases.random_mask(rng, SEQ_LEN, SEQ_LEN, 12) for i in range(2)}
    plans = [make_plan(mask, cp_size, config) for mask in named.values()]
    assert all(plan.late is not None and not plan.comm for plan in plans)
    others = {"overlap": (2, 1)}, {"overlap": 1, "travelling": ((30, 33), (60, 71))}
    plans += [make_plan(WINDOW, cp_size, dataclasses.replace(config, **other)) for other in others]
    spec = plans[0].spec.union(*(plan.spec for plan in plans[1:]))
    reference = DistOptions(implementation="reference")
    run = run_with(make_mesh(cp=cp_size), logits_soft_cap=cap, options=reference)
    for mask, plan in zip([*named.values(), WINDOW, WINDOW], plans, strict=True):
        problem, padded = random_problem(rng, SEQ_LEN), plan.pad_to(spec)
        answer = run(dispatched(problem, padded), padded)
        check(answer, padded, expected(problem, mask, logits_soft_cap=cap))
    assert run._cache_size() == 1


def test_late_queries_alone(rng):
    plan = make_plan(WINDOW, 4, dataclasses.replace(CONFIG, dispatch="zigzag"))
    problem = random_problem(rng, SEQ_LEN)
    answer = run_with(make_mesh(cp=4))(dispatched(problem, plan), plan)
    check(answer, plan, expected(problem, WINDOW))


def test_kept_keys(rng):
    """Also where the program has stages that the plan leaves empty, and the other way round."""
    plans = [make_plan(WINDOW, 4, dataclasses.replace(CONFIG, overlap=o)) for o in ("late", (2, 1))]
    spec = plans[0].spec.union(plans[1].spec)
    problem = random_problem(rng, SEQ_LEN, heads=6, kv_heads=1)
    run = run_with(make_mesh(cp=4), options=DistOptions(keep_remote_kv=True))
    for plan in (plan.pad_to(spec) for plan in plans):
        check(run(dispatched(problem, plan), plan), plan, expected(problem, WINDOW))


@pytest.mark.parametrize("keep", [False, True])
def test_late_queries_in_the_forward_pass_alone(keep, rng):
    """Where merging stages is dear, and bringing gradients back with nothing beside it too."""
    model = CostModel(link_gbps=1e3, memory_gbps=1e-3, latency_us=0.0, grad_bytes=1 << 20)
    options = {"overlap": "auto", "cost_model": model, "dispatch": "contiguous"}
    config = dataclasses.replace(CONFIG, **options)
    plan = make_plan(masks.causal(SEQ_LEN), 2, config)
    assert plan.late is not None
    assert not plan.comm
    assert plan.backward_stages.late is None
    assert plan.backward_stages.comm
    run = run_with(make_mesh(cp=2), options=DistOptions(keep_remote_kv=keep))
    for mask in (masks.causal(SEQ_LEN), WINDOW, masks.empty(SEQ_LEN)):
        problem, other = random_problem(rng, SEQ_LEN), make_plan(mask, 2, config, spec=plan.spec)
        check(run(dispatched(problem, other), other), other, expected(problem, mask))
    assert run._cache_size() == 1


def test_batches_share_a_plan_or_have_their_own(rng):
    mesh = make_mesh(dp=2, cp=4)
    mask_of = [WINDOW, masks.causal(SEQ_LEN)]
    both = [make_plan(mask, 4, CONFIG) for mask in mask_of]
    spec = both[0].spec.union(both[1].spec)
    stacked = stack_plans([plan.pad_to(spec) for plan in both])
    problem = random_problem(rng, SEQ_LEN, lead=(2,))
    run = run_with(mesh, options=DistOptions(batch_axes="dp"))
    shared = dispatched(problem, both[0], axis=1)
    check(run(shared, both[0]), both[0], expected_batch(problem, [WINDOW] * 2), axis=1)
    own = Problem(**dispatch(problem.rows, stacked, axis=1), sinks=problem.sinks)
    check(run(own, stacked), stacked, expected_batch(problem, mask_of), axis=1)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_the_largest_logit_counts_late_queries_and_all_sequences(lead, rng):
    plan = make_plan(WINDOW, 4, CONFIG)
    problem = random_problem(rng, SEQ_LEN, lead=lead)
    moved = dispatched(problem, plan, axis=len(lead))
    mesh = make_mesh(cp=4)
    _, found = jax.jit(
        lambda q, k, v: dist_attention(q, k, v, plan, mesh=mesh, return_max_logits=True)
    )(moved.q, moved.k, moved.v)
    keys = np.repeat(problem.k, 2, axis=-2)
    logits = np.einsum("...tnh,...snh->n...ts", problem.q, keys) * 8**-0.5
    wanted = np.where(WINDOW.dense(), logits, -np.inf).reshape(4, -1).max(axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(("overlap", "is_wide"), [("late", False), (1, True)])
def test_the_output_is_never_float32(overlap, is_wide):
    """Stages merge it in float32, at the size of all rows."""
    config = dataclasses.replace(CONFIG, chunk_size=512, overlap=overlap)
    plan = make_plan(masks.local(2048, window=(63, 0)), 4, config)
    assert plan.late is None or plan.late.num_rows.max() == 128
    x = jax.ShapeDtypeStruct((4 * plan.spec.local_len, 4, 16), jnp.bfloat16)
    mesh = make_mesh(cp=4)
    forward = jax.jit(lambda q, k, v, p: dist_attention(q, k, v, p, mesh=mesh))
    lowered = forward.lower(x, x, x, jax.tree.map(jnp.asarray, plan))
    assert ("tensor<512x4x16xf32>" in lowered.as_text()) == is_wide
    # One cast of k and v in either case.
    assert len(hlo.collectives(lowered.compile().as_text())) == 2


def test_late_queries_do_not_travel():
    with pytest.raises(ValueError, match=r"wants travelling=.never."):
        make_plan(WINDOW, 4, dataclasses.replace(CONFIG, travelling=((30, 33),)))
