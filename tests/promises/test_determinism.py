"""Equal inputs give equal bits: again, in another thread's share of the work, and under another plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import magi_jax as mj


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_denormals_do_not_depend_on_the_thread(dtype, rng):
    """Which of XLA's threads computes a tile must not decide whether its denormals count."""
    size = {"float32": 1e-40, "float16": 5e-6}[dtype]
    q, k, v = (jnp.asarray(rng.normal(size=(1024, 4, 8)), jnp.float32) for _ in range(3))
    inputs = [(x * s).astype(dtype) for x, s in ((q, 1.0), (k, 1.0), (v, size))]
    table = mj.slice_table(mj.masks.causal(1024))
    run = jax.jit(jax.vmap(lambda *x: mj.flex_flash_attention(*x, table), in_axes=0))
    batch = [jnp.stack([x] * 4) for x in inputs]
    first = np.asarray(run(*batch))
    assert (first == first[:1]).all()
    for _ in range(3):
        np.testing.assert_array_equal(run(*batch), first)
    if dtype == "float16":
        assert (first != 0).mean() > 0.5, "denormals of float16 count"


def test_training_step_repeats_bit_for_bit(rng):
    mask = mj.masks.varlen([90, 31, 135], causal=True)
    plan = mj.make_plan(mask, 8, mj.PlanConfig(chunk_size=8, overlap=2, roll_shifts=()))
    mesh = jax.make_mesh((8,), ("cp",), (AxisType.Auto,))
    x = rng.normal(size=(3, mask.q_len, 2, 8)).astype(np.float32)
    inputs = mj.dispatch(list(x), plan)
    run = jax.jit(jax.value_and_grad(lambda x: (mj.dist_attention(*x, plan, mesh=mesh) ** 2).sum()))
    first = run(inputs)
    for _ in range(4):
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(run(inputs)), strict=True):
            np.testing.assert_array_equal(a, b)
