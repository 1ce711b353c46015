"""The forward with more keys than its kernels for short calls take, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import PATHS, Case, check

from magi_jax import masks
from magi_jax.ops import cuda
from magi_jax.plan import slice_table
from magi_jax.testing import oracle
from magi_jax.testing.cases import random_mask

FORWARD_PATHS = [path for path in PATHS if path is not cuda.SM90_ORDERED]
FEW_KEYS = 2048  # of the Hopper forward


def many_keys(rng: np.random.Generator) -> list[masks.AttnMask]:
    """Masks of 90 queries and some more than `FEW_KEYS` keys: long walks, gaps, many short slices."""
    documents = masks.varlen([2000, 30, 1, 45, 90, 130, 60], causal=True)
    return [
        masks.causal(90, 2300, offset=2210),
        masks.local(2200, window=(600, 0)).crop((2070, 2160), (0, 2200)),
        documents.crop((2000, 2090), (0, documents.k_len)),
        random_mask(rng, 90, 2300, 30),
    ]


@pytest.mark.parametrize("path", FORWARD_PATHS, ids=lambda path: path.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("heads", [(8, 1), (2, 2)])
def test_many_keys(path, dtype, dims, heads):
    for mask in many_keys(np.random.default_rng(dims[0])):
        case = Case(mask, dtype, *heads, *dims)
        q, k, v, *_ = case.operands()
        out, lse = path.forward(q, k, v, slice_table(mask), out_dtype=jnp.float32, **case.options)
        operands = (np.asarray(x, np.float64) for x in (q, k, v))
        want = oracle.attention(*operands, mask.dense(), **case.options)
        names = ("out", "lse")
        check(
            dict(zip(names, map(np.asarray, (out, lse)), strict=True)),
            dict(zip(names, want, strict=True)),
            dtype,
        )


@pytest.mark.parametrize(("head_dim", "few"), [(64, FEW_KEYS // 2), (128, FEW_KEYS)])
def test_short_calls_take_a_kernel_of_their_own(head_dim, few):
    for path in FORWARD_PATHS:
        kernels = []
        for keys in (few, few + 1):
            q, k = (jax.ShapeDtypeStruct((n, 8, head_dim), jnp.bfloat16) for n in (100, keys))
            table = slice_table(masks.full(100, keys))
            kernels.append(path.describe(q, k, k, table).splitlines()[0])
        assert (kernels[0] != kernels[1]) == (path is cuda.SM90), kernels
