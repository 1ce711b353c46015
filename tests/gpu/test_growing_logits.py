"""Logits that outgrow by far what the first block of keys let the online softmax expect."""

import jax.numpy as jnp
import pytest
from device_cases import PATHS, Case, check, expected, run

from magi_jax import masks


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("growth", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("keys", [700, 2300])
def test_later_blocks_may_outgrow_earlier_ones(path, dtype, growth, keys):
    """At 8 they do so by more powers of two than a float has; at 0.5 by more than a float16 has."""
    mask = masks.causal(300, keys, offset=keys - 300)
    case = Case(mask, dtype=dtype, scale=2.0, num_heads=8, num_kv_heads=1)
    q, k, *rest = case.operands()
    ramp = jnp.linspace(0.01, growth, k.shape[0])[:, None, None]
    operands = (q, (k * ramp).astype(k.dtype), *rest)
    got, want = run(path, case, operands), expected(case, operands)
    names = ("out", "lse")
    check({name: got[name] for name in names}, {name: want[name] for name in names}, dtype)
