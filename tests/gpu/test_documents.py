"""Gradients of many short documents, which Hopper's backward walks whole, against float64 for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import PATHS, needs_hopper

import magi_jax
from magi_jax import masks
from magi_jax.ops import cuda
from magi_jax.testing import oracle

# Lengths around those of tiles and blocks, and longer than some of both.
LENGTHS = [1, 3, 60, 64, 65, 127, 128, 129, 190, 255, 257, 320]
SCALE = 0.09


def documents(kind, rng):
    """(mask, queries, keys) of each document; some show nothing, some have more keys than queries."""
    lengths = rng.permutation(LENGTHS * 4)
    for i, length in enumerate(int(x) for x in lengths):
        keys = length if kind != "keys" else int(rng.integers(1, 400))
        if kind == "gaps" and i % 3 == 0:
            yield masks.empty(int(rng.integers(1, 150)), int(rng.integers(1, 300)))
        if kind == "full" or kind == "keys":
            yield masks.full(length, keys)
        elif kind == "windows":
            yield masks.local(length, window=(int(rng.integers(0, 200)), int(rng.integers(0, 50))))
        else:
            yield masks.causal(length)


@functools.partial(jax.jit, static_argnums=0)
def gradients(implementation, q, k, v, dout, table):
    def loss(q, k, v):
        out = magi_jax.flex_flash_attention(
            q, k, v, table, scale=SCALE, implementation=implementation
        )
        return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def zeros(mask, heads, kv_heads):
    """dout, q, k, v, lse and delta."""
    shapes = ((mask.q_len, heads), (mask.q_len, heads), *[(mask.k_len, kv_heads)] * 2)
    arrays = [jnp.zeros((*shape, 128), jnp.bfloat16) for shape in shapes]
    return (*arrays, *[jnp.zeros((mask.q_len, heads))] * 2)


@needs_hopper
@pytest.mark.parametrize(
    ("kind", "heads", "dtype", "taken"),
    [
        ("causal", 32, jnp.bfloat16, "documents"),
        ("gaps", 32, jnp.bfloat16, "documents"),
        ("causal", 32, jnp.float32, "tiles"),  # float32 dQ is added to
        ("one", 32, jnp.bfloat16, "tiles"),
        ("long", 16, jnp.bfloat16, "segments"),
    ],
)
def test_kernel_that_ran(kind, heads, dtype, taken):
    if kind == "one":
        mask = masks.causal(1000)
    elif kind == "long":
        mask = masks.full(40000, 256)
    else:
        mask = masks.concatenate(list(documents(kind, np.random.default_rng(0))))
    options = {"scale": SCALE, "logits_soft_cap": 0.0}
    items = cuda.SM90.backward_items(
        *zeros(mask, heads, 4), table=magi_jax.slice_table(mask), dq_dtype=dtype, **options
    )
    assert {name: int(count) > 0 for name, count in items._asdict().items()} == {
        name: name == taken for name in items._fields
    }


@pytest.mark.parametrize("path", [path.name for path in PATHS])
@pytest.mark.parametrize("kind", ["causal", "full", "windows", "keys", "gaps"])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads"), [("bfloat16", 32, 4), ("float16", 20, 20), ("bfloat16", 24, 8)]
)
def test_documents(path, kind, dtype, heads, kv_heads):
    rng = np.random.default_rng(heads)
    parts = list(documents(kind, rng))
    mask = masks.concatenate(parts)
    shapes = ((mask.q_len, heads), (mask.k_len, kv_heads), (mask.k_len, kv_heads))
    q, k, v = (jnp.asarray(rng.standard_normal((*shape, 128)), dtype) for shape in shapes)
    dout = jnp.asarray(rng.standard_normal(q.shape), dtype)
    table = magi_jax.slice_table(mask)
    got = [np.asarray(x, np.float64) for x in gradients(path, q, k, v, dout, table)]
    assert all(np.isfinite(x).all() for x in got)
    want = [np.zeros_like(x) for x in got]
    query = key = 0
    for part in parts:
        rows, keys = slice(query, query + part.q_len), slice(key, key + part.k_len)
        query, key = rows.stop, keys.stop
        arrays = [np.asarray(x, np.float64) for x in (q[rows], k[keys], v[keys], dout[rows])]
        found = oracle.attention_grads(
            *arrays[:3], part.dense(), arrays[3], np.zeros(arrays[0].shape[:2]), scale=SCALE
        )
        want[0][rows], want[1][keys], want[2][keys] = found.dq, found.dk, found.dv
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error < (8e-3 if dtype == "bfloat16" else 1e-3), f"{name}: error {error:.2e}"
