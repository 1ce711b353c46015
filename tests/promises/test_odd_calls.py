"""Calls at the edge of what is legal: right or refused by name, on one device and over several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.plan import PlanConfig

CP = 2
MASK = mj.masks.varlen([30, 34, 64], causal=True)
HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((CP,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:CP])


@pytest.fixture(scope="module")
def plan():
    return mj.make_plan(MASK, CP, PlanConfig(chunk_size=8))


def operands(rng, *lead):
    shapes = [(*lead, MASK.q_len, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def on_one_device(q, k, v, **options):
    return mj.flex_flash_attention(q, k, v, MASK, **options)


@pytest.fixture(params=["one device", "several"])
def attend(request, mesh, plan):
    if request.param == "one device":
        return on_one_device

    def over_several(q, k, v, **options):
        return mj.dist_attention(q, k, v, plan, mesh=mesh, **options)

    return over_several


def test_a_batch_without_a_sequence(attend, rng):
    q, k, v = operands(rng, 0)
    sinks = jnp.ones(HEADS)

    def loss(q, k, v, sinks):
        out, max_logits = attend(q, k, v, sinks=sinks, return_max_logits=True)
        assert out.shape == q.shape
        return out.sum(), max_logits

    grads, max_logits = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, sinks)
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v, sinks)]
    assert not np.any(grads[3])
    np.testing.assert_array_equal(max_logits, np.full(HEADS, -np.inf))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scale": 1e39}, "scale must fit in float32"),
        ({"scale": -1e39}, "scale must fit in float32"),
        ({"logits_soft_cap": 1e39}, "logits_soft_cap must fit in float32"),
        ({"logits_soft_cap": 1e-46}, "logits_soft_cap must fit in float32"),
        ({"sinks": np.arange(HEADS)}, "sinks must be floating"),
    ],
)
def test_options_that_kernels_would_read_as_others(attend, rng, options, match):
    with pytest.raises(ValueError, match=match):
        attend(*operands(rng), **options)


def test_forward_mode_is_refused(attend, rng):
    q, k, v = operands(rng)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attend(q, k, v), (q,), (q,))


def test_donated_queries(attend, rng):
    arrays = operands(rng)
    expected = attend(*arrays)
    donating = jax.jit(lambda q, k, v: attend(q, k, v), donate_argnums=0)
    got = donating(arrays[0] + 0, *arrays[1:])
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_one_array_as_queries_keys_and_values(attend, rng):
    _, x, _ = operands(rng)
    different = [x + 0 for _ in range(3)]
    np.testing.assert_array_equal(attend(x, x, x), attend(*different))


def test_a_plan_whose_arrays_are_donated(mesh, plan, rng):
    q, k, v = operands(rng)
    there = jax.device_put(jax.tree.map(np.array, plan), NamedSharding(mesh, P("cp")))
    expected = mj.dist_attention(q, k, v, there, mesh=mesh)

    def step(plan, q):
        return plan, mj.dist_attention(q, k, v, plan, mesh=mesh)

    kept, out = jax.jit(step, donate_argnums=0)(there, q)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert jax.tree.map(np.array, kept).fingerprint() == plan.fingerprint()
