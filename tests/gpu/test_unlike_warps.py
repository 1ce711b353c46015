"""Warps of the Hopper forward that issue products together, of which one sees its first key late."""

import functools
import operator

import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import Case, check, needs_hopper

from magi_jax import masks
from magi_jax.ops import cuda
from magi_jax.plan import slice_table
from magi_jax.testing import oracle

pytestmark = needs_hopper
ROWS, WARP_ROWS = 64, 16  # (token, head) pairs of a warpgroup, and of one of its four warps
HIDDEN = 500  # keys: more than two blocks


def late_warp(tokens: int, keys: int, heads: int) -> masks.AttnMask:
    """The first warp of each warpgroup sees the keys from HIDDEN on, the others see all."""
    late, period = WARP_ROWS // heads, ROWS // heads
    parts = []
    for token in range(0, tokens, period):
        parts.append(masks.full(late, keys - HIDDEN).shift(token, HIDDEN, tokens, keys))
        parts.append(masks.full(period - late, keys).shift(token + late, 0, tokens, keys))
    return functools.reduce(operator.or_, parts)


@pytest.mark.parametrize("keys", [1100, 2600, 5000])  # three kernels
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 1), (2, 2)])
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [("bfloat16", dims) for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))]
    + [("float16", (128, 128))],
)
def test_a_warp_that_sees_its_first_key_late(keys, num_heads, num_kv_heads, dtype, dims):
    mask = late_warp(256, keys, num_heads // num_kv_heads)
    case = Case(mask, dtype, num_heads, num_kv_heads, *dims)
    operands = case.operands()[:3]
    results = cuda.SM90.forward(*operands, slice_table(mask), out_dtype=jnp.float32, **case.options)
    dense = (np.asarray(x, np.float64) for x in operands)
    want = oracle.attention(*dense, mask.dense(), **case.options)
    names = ("out", "lse")
    got = map(np.asarray, results[:2])
    check(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)), dtype)
