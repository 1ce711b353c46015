"""Queries and keys that are different tokens: dispatched apart, or keys whole on every rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import expected, make_mesh, random_problem, value_and_grads
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import dispatch, dist_attention, undispatch
from magi_jax.plan import PlanConfig, make_plan, stack_plans
from magi_jax.testing import cases, hlo

Q_LEN, K_LEN = 53, 91
DECODER = make_plan(masks.causal(Q_LEN), 4, PlanConfig(chunk_size=4))
ENCODER = make_plan(masks.varlen([40, 51]), 4, PlanConfig(chunk_size=8))


def cross_problem(rng):
    """Queries, cotangents and sinks of one problem, keys and values of a longer one."""
    problem, other = random_problem(rng, Q_LEN), random_problem(rng, K_LEN)
    return problem._replace(k=other.k, v=other.v)


def cross_masks(rng):
    return {
        "documents": masks.varlen([20, 0, 33], k_lengths=[50, 7, 34]),
        "random": cases.random_mask(rng, Q_LEN, K_LEN, 9),
        "fewer_rows": masks.full(Q_LEN - 6, K_LEN - 11),
    }


def placed(problem, keys):
    rows = {name: dispatch(getattr(problem, name), DECODER) for name in ("q", "dout", "dlse")}
    if keys != "replicated":
        rows |= {name: dispatch(getattr(problem, name), ENCODER) for name in ("k", "v")}
    return problem._replace(**rows)


def check(answer, keys, wanted):
    for name in answer._fields:
        got = np.asarray(getattr(answer, name), np.float64)
        if name in ("out", "lse", "dq"):
            got = undispatch(got, DECODER)
        elif name in ("dk", "dv") and keys != "replicated":
            got = undispatch(got, ENCODER)
        want = getattr(wanted, name)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=name)


def attend(plan, **options):
    return lambda q, k, v, sinks: dist_attention(
        q, k, v, plan, sinks=sinks, return_residual=True, **options
    )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("documents", ENCODER),
        ("fewer_rows", ENCODER),
        ("random", "replicated"),
        ("fewer_rows", "replicated"),
    ],
    ids=["documents", "fewer_rows", "random_replicated", "fewer_rows_replicated"],
)
def test_results_and_gradients(name, keys, rng):
    mask, problem = cross_masks(rng)[name], cross_problem(rng)
    plan = DECODER.with_mask(mask, keys=keys)
    run = jax.jit(lambda p, plan: value_and_grads(attend(plan, mesh=make_mesh(cp=4)), p))
    whole = masks.AttnMask(mask.slices, Q_LEN, K_LEN)
    if keys == "replicated":
        problem = problem._replace(k=problem.k[: mask.k_len], v=problem.v[: mask.k_len])
        whole = masks.AttnMask(mask.slices, Q_LEN, mask.k_len)
    lowered = run.lower(placed(problem, keys), plan)
    check(lowered.compile()(placed(problem, keys), plan), keys, expected(problem, whole))
    if keys == "replicated":
        # Of the keys nothing but the sum of their gradients crosses ranks.
        assert hlo.collectives(lowered.compile(), "all-to-all") == []


@pytest.mark.parametrize("keys", [ENCODER, "replicated"], ids=["dispatched", "replicated"])
def test_inside_a_shard_map(keys, rng):
    mask, problem = cross_masks(rng)["documents"], cross_problem(rng)
    plan = DECODER.with_mask(mask, keys=keys)
    rows = P("cp")
    key_rows = P() if keys == "replicated" else rows

    @jax.jit
    def run(problem, plan):
        attention = jax.shard_map(
            lambda q, k, v, sinks, plan: attend(plan)(q, k, v, sinks),
            mesh=make_mesh(cp=4),
            in_specs=(rows, key_rows, key_rows, P(), rows),
            out_specs=(rows, rows),
        )
        return value_and_grads(lambda *operands: attention(*operands, plan), problem)

    check(run(placed(problem, keys), plan), keys, expected(problem, mask))


def test_explicit_axes_with_replicated_keys(rng):
    mesh = make_mesh(AxisType.Explicit, dp=2, cp=4)
    mask, problem = cross_masks(rng)["documents"], cross_problem(rng)
    plan = DECODER.with_mask(mask, keys="replicated")
    arrays = placed(problem, "replicated")
    q = jax.device_put(np.stack([arrays.q] * 2), NamedSharding(mesh, P("dp", "cp")))
    k, v = (
        jax.device_put(np.stack([x] * 2), NamedSharding(mesh, P("dp")))
        for x in (problem.k, problem.v)
    )
    with jax.set_mesh(mesh):
        out = jax.jit(lambda q, k, v: dist_attention(q, k, v, plan))(q, k, v)
    wanted = expected(problem, mask, sinks=False).out
    for row in np.asarray(out):
        np.testing.assert_allclose(undispatch(row, DECODER), wanted, rtol=2e-5, atol=2e-5)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="rows of k or v are sharded"):
        jax.jit(lambda q: dist_attention(q, q, q, plan))(q)


def test_gradients_of_replicated_keys_are_rounded_once():
    """Three ranks give 257, which is 256 in bfloat16, and one 260: together 1031, which is 1032."""
    plan = make_plan(masks.full(8), 4, PlanConfig(chunk_size=2))
    plan = plan.with_mask(masks.full(8, 1), keys="replicated")
    dout = jnp.asarray([256, 1, 256, 1, 256, 1, 256, 4], jnp.bfloat16).reshape(8, 1, 1)
    zeros = jnp.zeros((8, 1, 8), jnp.bfloat16)

    def loss(v):
        out = dist_attention(zeros, zeros[:1], v, plan, mesh=make_mesh(cp=4))
        return jnp.sum(out.astype(jnp.float32) * dout)

    np.testing.assert_array_equal(plan.positions.ravel(), np.arange(8))
    dv = jax.jit(jax.grad(loss))(jnp.ones((1, 1, 1), jnp.bfloat16))
    assert dv.item() == 1032


def test_few_queries_travel_to_many_keys(rng):
    """By themselves, where that is cheaper than to bring all keys to all ranks."""
    latents = make_plan(masks.full(32), 4, PlanConfig(chunk_size=8))
    tokens = make_plan(masks.causal(65536), 4, PlanConfig(chunk_size=2048))
    mask = masks.full(32, 65536)
    plan = latents.with_mask(mask, keys=tokens)
    assert plan.travel is not None
    assert not plan.report().recv_rows.any()
    at_home = latents.with_mask(mask, keys=tokens, travelling="never")
    assert at_home.travel is None
    assert (at_home.report().recv_rows >= 3 * 16384).all()


def test_reports_say_nothing_of_rings():
    plan = DECODER.with_mask(masks.full(Q_LEN, K_LEN), keys=ENCODER)
    text = str(plan.report())
    assert "rows received" in text
    assert "ring" not in text
    assert "ring" in str(DECODER.report())
    with pytest.raises(ValueError, match="bounds are of self-attention"):
        plan.report(mask=masks.full(Q_LEN, K_LEN))


def test_one_program_serves_many_masks(rng):
    first, second = (cases.random_mask(rng, Q_LEN, K_LEN, 6) for _ in range(2))
    specs = [DECODER.with_mask(mask, keys=ENCODER, overlap=1).spec for mask in (first, second)]
    both = specs[0].union(specs[1])
    plans = [DECODER.with_mask(m, keys=ENCODER, overlap=1, spec=both) for m in (first, second)]
    assert plans[0].spec == plans[1].spec == both
    assert stack_plans(plans).spec.keys == "other"


def test_encoder_and_decoder_train_as_one(rng):
    """A model on both sides of cross-attention: gradients of shared weights are those of the dense
    model.
    """
    mask = masks.varlen([20, 0, 33], k_lengths=[40, 7, 44])
    cross = DECODER.with_mask(mask, keys=ENCODER)
    source = rng.normal(size=(K_LEN, 2, 8)).astype(np.float32)
    target = rng.normal(size=(Q_LEN, 2, 8)).astype(np.float32)
    weight = rng.normal(size=(3, 8, 8)).astype(np.float32) / 4

    def model(attentions, weight, source, target):
        encode, decode, meet = attentions
        memory = source + encode(source @ weight[0], source)
        hidden = target + decode(target @ weight[1], target)
        return hidden + meet(hidden @ weight[2], memory)

    def dense(mask):
        visible = mask.dense()

        def attention(q, k):
            x = jnp.where(visible, jnp.einsum("tnh,snh->nts", q, k) * 8**-0.5, -jnp.inf)
            top = jnp.maximum(x.max(-1, keepdims=True), -1e30)
            weights = jnp.exp(x - top)
            total = weights.sum(-1, keepdims=True)
            return jnp.einsum("nts,snh->tnh", weights / jnp.where(total == 0, 1, total), k)

        return attention

    def sharded(plan):
        return lambda q, k: dist_attention(q, k, k, plan, mesh=make_mesh(cp=4))

    def loss(attentions, weight, source, target):
        return (model(attentions, weight, source, target) ** 2).sum()

    every = [masks.varlen([40, 51]), masks.causal(Q_LEN), mask]
    args = (weight, source, target)
    wanted = jax.jit(jax.grad(lambda *a: loss([dense(m) for m in every], *a)))(*args)
    plans = [sharded(plan) for plan in (ENCODER, DECODER, cross)]
    place = (weight, dispatch(source, ENCODER), dispatch(target, DECODER))
    got = jax.jit(jax.grad(lambda *a: loss(plans, *a)))(*place)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_refusals():
    mask = masks.full(Q_LEN, K_LEN)
    with pytest.raises(ValueError, match=r"with_mask\(mask, keys=...\)"):
        make_plan(mask, 4)
    with pytest.raises(ValueError, match='keys must be a plan, "replicated" or None'):
        DECODER.with_mask(mask, keys="everywhere")
    with pytest.raises(
        TypeError, match=r"that dispatched them, .*got AttnMask: make_plan.*cp_size=4"
    ):
        DECODER.with_mask(mask, keys=masks.full(K_LEN))
    with pytest.raises(ValueError, match="keys are on 2 ranks, the queries on 4"):
        DECODER.with_mask(mask, keys=make_plan(masks.full(K_LEN), 2))
    with pytest.raises(ValueError, match="sequences have only 53 and 53"):
        DECODER.with_mask(mask, keys=DECODER)
    with pytest.raises(ValueError, match=r"nobody need travel, got travelling=\(\(0, 9\),\)"):
        DECODER.with_mask(mask, keys="replicated", travelling=((0, 9),))
    with pytest.raises(ValueError, match="other tokens"):
        DECODER.with_mask(mask, keys=ENCODER).plot("never.png")
    q = np.zeros((4 * DECODER.spec.local_len, 2, 8), np.float32)
    mesh = make_mesh(cp=4)
    with pytest.raises(ValueError, match=r"k has \d+ rows.*dispatch\(x, plan_of_the_keys"):
        dist_attention(q, q, q, DECODER.with_mask(mask, keys=ENCODER), mesh=mesh)
    with pytest.raises(ValueError, match="plan is for 91 keys on every rank"):
        dist_attention(q, q, q, DECODER.with_mask(mask, keys="replicated"), mesh=mesh)
