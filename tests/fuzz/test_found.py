"""What fuzzing found, each as a test of its own."""

import jax.numpy as jnp
import numpy as np
import pytest

import magi_jax as mj


@pytest.mark.parametrize(
    ("dtype", "idle"),
    [("int8", -1), ("uint8", 250), ("int16", -300), ("uint16", 65535), ("uint32", 2**32 - 1)],
)
def test_block_indices_of_any_integer_type(dtype, idle):
    """300 blocks do not fit int8, which then could not say "none"."""
    blocks = jnp.asarray(np.array([[idle, 3]] * 240, dtype))
    slices = np.asarray(mj.block_sparse_table(blocks, 1, 240, 240).slices)
    assert np.unique(slices[slices[:, 1] > slices[:, 0]][:, 2]).tolist() == [3]


def test_denormal_float16_counts_on_the_cpu():
    """The kernel widened through denormal float32, which XLA's threads take for zero."""
    value = np.float16(2.0**-24)
    q = k = jnp.zeros((40, 1, 4), jnp.float16)
    v = jnp.full((40, 1, 4), value)
    out = mj.flex_flash_attention(q, k, v, mj.masks.causal(40))
    np.testing.assert_array_equal(out, np.full(out.shape, value))


def test_infinities_do_not_change_how_others_are_rounded(rng):
    """Sums with a NaN somewhere in the block were made without fused products."""
    x = rng.normal(size=(3, 96, 1, 8)).astype(np.float32)
    mask = mj.masks.varlen([20, 76], causal=True)
    clean = mj.flex_flash_attention(*x, mask)
    x[:, :20] = np.nan
    np.testing.assert_array_equal(mj.flex_flash_attention(*x, mask)[20:], clean[20:])
