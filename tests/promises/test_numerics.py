"""Errors do not grow with stages, ranks or the number of keys; merging is stable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import magi_jax as mj
from magi_jax.ops.lse import merge
from magi_jax.testing import oracle

LENGTHS = [100, 7, 120, 29]
HEADS, KV_HEADS, DIM = 2, 1, 16


def _errors(got, want):
    return [
        float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max())
        for a, b in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize(
    ("dtype", "setups"),
    [("float32", [(1, 1), (8, 4)]), ("bfloat16", [(1, 1), (8, 1), (8, 4)])],
)
def test_error_is_independent_of_ranks_and_stages(dtype, setups, rng):
    """bfloat16 would lose a bit with every merge if partial results were rounded to it."""
    mask = mj.masks.varlen(LENGTHS, causal=True)
    size = mask.q_len
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, DIM))
    inputs = [np.array(jnp.asarray(rng.normal(size=(size, *s)), dtype), np.float32) for s in shapes]
    dense = mask.dense()
    want = [oracle.attention(*inputs[:3], dense)[0]]
    want += oracle.attention_grads(*inputs[:3], dense, inputs[3])[:3]
    errors = {}
    for cp_size, stages in setups:
        config = mj.PlanConfig(chunk_size=8, overlap=stages, dispatch="zigzag", roll_shifts=())
        plan = mj.make_plan(mask, cp_size, config)
        mesh = jax.make_mesh((cp_size,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:cp_size])

        @jax.jit
        def run(q, k, v, dout, plan=plan, mesh=mesh):
            q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
            out, pull_back = jax.vjp(lambda *x: mj.dist_attention(*x, plan, mesh=mesh), q, k, v)
            return out, *pull_back(dout)

        got = run(*mj.dispatch(inputs, plan))
        got = mj.undispatch([np.asarray(x, np.float32) for x in got], plan)
        errors[cp_size, stages] = _errors(got, want)
    alone = errors[1, 1]
    limit, slack = {"float32": (2e-6, 1e-6), "bfloat16": (8e-3, 1e-3)}[dtype]
    for setup, found in errors.items():
        for one, many in zip(alone, found, strict=True):
            assert many <= limit, (setup, errors)
            assert many <= 2 * one + slack, (setup, errors)


@pytest.mark.parametrize("first", [-np.inf, 0.0, 1e4, -1e4, 88.0])
@pytest.mark.parametrize("second", [-np.inf, 0.0, 1e4, -1e4, -88.0])
def test_merge(first, second):
    """As the logarithm of a sum says, and with finite gradients, -inf on both sides included."""
    lse = [jnp.full((3, 1), x, jnp.float32) for x in (first, second)]
    out = [
        jnp.where(x[..., None] == -jnp.inf, 0.0, sign)
        for x, sign in zip(lse, (1.0, -2.0), strict=True)
    ]

    def run(out_a, lse_a, out_b, lse_b):
        return merge(out_a, lse_a, out_b, lse_b)

    (got, got_lse), pull_back = jax.vjp(run, out[0], lse[0], out[1], lse[1])
    top = max(first, second)
    weights = [0.0 if x == -np.inf else np.exp(x - top) for x in (first, second)]
    total = sum(weights)
    want = (weights[0] - 2 * weights[1]) / total if total else 0.0
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got_lse, top + np.log(total) if total else -np.inf, rtol=1e-6)
    for gradient in pull_back((jnp.ones_like(got), jnp.ones_like(got_lse))):
        assert np.isfinite(gradient).all()


def test_merging_many_parts_in_any_order_adds_no_error(rng):
    """64 parts, some empty: in rising, falling and random order, and as a tree."""
    lse = np.where(rng.random((64, 5, 2)) < 0.3, -np.inf, rng.normal(size=(64, 5, 2)) * 5)
    out = np.where(np.isneginf(lse)[..., None], 0.0, rng.normal(size=(64, 5, 2, 3)))
    weights = np.exp(lse)
    want_lse = np.log(weights.sum(0))
    want = (weights[..., None] * out).sum(0) / weights.sum(0)[..., None]
    parts = [
        (jnp.asarray(o, jnp.float32), jnp.asarray(x, jnp.float32))
        for o, x in zip(out, lse, strict=True)
    ]
    step = jax.jit(merge)
    for order in (range(64), range(63, -1, -1), rng.permutation(64).tolist()):
        total = parts[order[0]]
        for i in order[1:]:
            total = step(*total, *parts[i])
        np.testing.assert_allclose(total[0], want, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(total[1], want_lse, rtol=2e-6, atol=2e-6)
    while len(parts) > 1:
        parts = [step(*parts[i], *parts[i + 1]) for i in range(0, len(parts), 2)]
    np.testing.assert_allclose(parts[0][0], want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 5e-6), ("bfloat16", 4e-3)])
def test_half_a_million_keys(dtype, limit, rng):
    """Few queries over 512K keys: the mean of so many values is small, and its error smaller."""
    keys, queries = 2**19, 4
    q = rng.normal(size=(queries, 1, 8))
    k, v = rng.normal(size=(2, keys, 1, 8))
    # Values that depend on keys: else dq is a difference of equals, and its error that of a rounded out.
    v += k + 0.25
    dout = rng.normal(size=q.shape)
    q, k, v, dout = (jnp.asarray(x, dtype) for x in (q, k, v, dout))
    mask = mj.masks.full(queries, keys)

    @jax.jit
    def run(q, k, v, dout, table):
        attend = lambda *x: mj.flex_flash_attention(*x, table, return_residual=True)  # noqa: E731
        (out, lse), pull_back = jax.vjp(attend, q, k, v)
        return out, lse, *pull_back((dout, jnp.zeros_like(lse)))

    got = run(q, k, v, dout, mj.slice_table(mask))
    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    dense = np.ones((queries, keys), bool)
    want = [
        *oracle.attention(*wide[:3], dense),
        *oracle.attention_grads(*wide[:3], dense, wide[3])[:3],
    ]
    errors = _errors(got, want)
    assert max(errors[:1] + errors[2:]) <= limit, errors
    assert errors[1] <= 1e-6, errors


@pytest.mark.parametrize(
    ("dtype", "unit"), [(jnp.bfloat16, 2.0**-7), (jnp.float16, 2.0**-10), (jnp.float16, 2.0**-24)]
)
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_results_are_rounded_to_nearest_even(dtype, unit, implementation):
    """The mean of two neighbours lies half way between them; the last numbers are denormals of float16."""
    base = 0.0 if unit < 1e-6 else 1.0
    below = base + unit * np.arange(0, 7)
    v = jnp.asarray(np.stack([below, below + unit])[:, None], dtype)
    q = k = jnp.zeros((2, 1, 8), dtype)
    out = mj.flex_flash_attention(q, k, v, mj.masks.full(2), implementation=implementation)
    even = base + unit * np.round(np.arange(0, 7) + 0.5)  # to even, as NumPy rounds
    np.testing.assert_array_equal(np.asarray(out[0, 0], np.float64), even)


def test_results_with_sinks_are_rounded_once(rng):
    """On one device, over ranks that hold whole documents, and over ranks that merge stages."""
    q, k, v = (jnp.asarray(rng.normal(size=(256, 2, 16)), jnp.bfloat16) for _ in range(3))
    sinks = jnp.asarray(rng.normal(size=2), jnp.float32)
    mesh = jax.make_mesh((4,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:4])
    documents, one = mj.masks.varlen([64] * 4, causal=True), mj.masks.causal(256)
    for mask, staged in ((documents, None), (documents, False), (one, True)):
        if staged is None:
            out = mj.flex_flash_attention(q, k, v, mask, sinks=sinks)
        else:
            overlap = 2 if staged else "auto"
            plan = mj.make_plan(mask, 4, mj.PlanConfig(chunk_size=16, overlap=overlap))
            assert plan.spec.num_remote_stages == (2 if staged else 0)
            moved = mj.dispatch([np.asarray(x) for x in (q, k, v)], plan)
            out = mj.dist_attention(*moved, plan, mesh=mesh, sinks=sinks)
            out = mj.undispatch(np.asarray(out), plan)
        wide = (np.asarray(x, np.float64) for x in (q, k, v))
        exact, _ = oracle.attention(*wide, mask.dense(), sinks=np.asarray(sinks))
        half_a_digit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)
        assert (np.abs(np.asarray(out, np.float64) - exact) <= 1.01 * half_a_digit + 1e-6).all()
