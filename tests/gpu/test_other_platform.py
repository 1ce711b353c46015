"""Calls whose arrays are on the CPU of a machine that has GPUs."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import magi_jax as mj
from magi_jax.testing import oracle

MASK = mj.masks.varlen([30, 20], causal=True)


def on_default_device(*arrays):
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(lambda q, k, v: mj.flex_flash_attention(q, k, v, MASK))(*arrays)


def on_committed_arrays(*arrays):
    return mj.flex_flash_attention(
        *(jax.device_put(x, jax.devices("cpu")[0]) for x in arrays), MASK
    )


def on_a_mesh(*arrays):
    cpus = jax.devices("cpu")[:1]
    mesh = jax.make_mesh((1,), ("cp",), (AxisType.Auto,), devices=cpus)
    plan = mj.make_plan(MASK, 1)
    dispatched = [mj.dispatch(x, plan) for x in arrays]
    out = jax.jit(lambda q, k, v: mj.dist_attention(q, k, v, plan, mesh=mesh))(*dispatched)
    return mj.undispatch(np.asarray(out), plan)


@pytest.mark.parametrize("run", [on_default_device, on_committed_arrays, on_a_mesh])
def test_float32(run, rng):
    arrays = [rng.standard_normal((MASK.q_len, heads, 8), np.float32) for heads in (4, 2, 2)]
    expected, _ = oracle.attention(*arrays, MASK.dense())
    np.testing.assert_allclose(run(*arrays), expected, rtol=1e-4, atol=1e-5)
