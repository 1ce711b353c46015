"""Features of attention in combination on the device: the cases of tests/features, on all GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
import several_devices
from feature_check import check
from feature_pairs import distributed_cases, on_a_gpu, one_device_cases

from magi_jax import flex_flash_attention, slice_table
from magi_jax.ops import cuda
from magi_jax.testing import oracle
from magi_jax.testing.cases import random_mask

DIMS = {"equal": (128, 128), "of values smaller": (192, 128)}


def on_this_gpu(case):
    """The case with kernels that the device has."""
    case = on_a_gpu(case)
    refused = cuda.refusal(case["implementation"], cuda.device_capability())
    return case | {"implementation": "sm80"} if refused else case


@pytest.mark.parametrize("number", range(len(one_device_cases())))
def test_one_device(number, rng):
    case = on_this_gpu(one_device_cases()[number])
    check(case, *one_device.run(case, rng, DIMS))


@pytest.mark.parametrize("number", range(len(distributed_cases())))
def test_distributed(number, rng):
    case = on_this_gpu(distributed_cases()[number])
    check(case, *several_devices.run(case, rng, DIMS))


def test_a_batch_under_a_shared_table(rng):
    """Whole tiles: all sequences in one call, whose table is made on the device."""
    mask = random_mask(rng, 256, 384, 9)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((3, 256, 4, 128), (3, 384, 2, 128), (3, 384, 2, 128))
    )
    table = jax.tree.map(jnp.asarray, slice_table(mask))

    @jax.jit
    def run(q, k, v, table):
        def loss(q, k, v):
            out = flex_flash_attention(q, k, v, table)
            return (out.astype(jnp.float32) ** 2).sum(), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    gradients, out = run(q, k, v, table)
    for b in range(3):
        wide = [np.asarray(x[b], np.float64) for x in (q, k, v)]
        right, _ = oracle.attention(*wide, mask.dense())
        wanted = oracle.attention_grads(*wide, mask.dense(), 2 * np.asarray(out[b], np.float64))
        for got, want in zip((out, *gradients), (right, *wanted[:3]), strict=True):
            error = np.abs(np.asarray(got[b], np.float64) - want).max()
            assert error < 2e-2 * max(np.abs(want).max(), 1.0)
