"""Gradients of many short documents, whose dQ Hopper's backward hands from tile to tile, in float64."""

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
        elif kind == "mixed":
            # One long document among them, whose tiles hand dQ on many times.
            yield masks.full(1100) if i == 7 else masks.causal(length)
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
        ("mixed", 32, jnp.bfloat16, "documents"),
        ("causal", 32, jnp.float32, "short_runs"),  # float32 dQ is added to
        ("one", 32, jnp.bfloat16, "short_runs"),
        ("longer causal", 32, jnp.bfloat16, "documents"),
        ("longer full", 32, jnp.bfloat16, "tiles"),  # 12 tiles walk each block
        ("long", 16, jnp.bfloat16, "segments"),
    ],
)
def test_kernel_that_ran(kind, heads, dtype, taken):
    if kind == "one":
        mask = masks.causal(1000)
    elif kind.startswith("longer"):
        mask = masks.varlen([1500] * 10, causal=kind == "longer causal")
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
@pytest.mark.parametrize("kind", ["causal", "full", "windows", "keys", "gaps", "mixed"])
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
    got, want = found_and_wanted(path, parts, q, k, v, dout)
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error < (8e-3 if dtype == "bfloat16" else 1e-3), f"{name}: error {error:.2e}"


@pytest.mark.parametrize("path", [path.name for path in PATHS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_unlike_size(path, dtype):
    """dQ of small rows is as precise as that of large ones, and columns of keys may stand out."""
    rng = np.random.default_rng(3)
    parts = [masks.full(int(length)) for length in rng.integers(140, 260, 40)]
    rows = sum(part.q_len for part in parts)
    q, dout = rng.standard_normal((2, rows, 16, 128))
    k, v = rng.standard_normal((2, rows, 4, 128))
    q[..., 5], k[..., 5] = q[..., 5] / 16, k[..., 5] * 16
    dout *= 10.0 ** rng.integers(-1, 2, (rows, 16, 1))
    q, k, v, dout = (jnp.asarray(x, dtype) for x in (q, k, v, dout))
    (found, *_), (wanted, *_) = found_and_wanted(path, parts, q, k, v, dout)
    found, wanted = (np.delete(x, 5, axis=-1) for x in (found, wanted))
    errors = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert errors.mean() < (6e-3 if dtype == "bfloat16" else 1.5e-3), f"{errors.mean():.2e}"


@pytest.mark.parametrize("path", [path.name for path in PATHS])
def test_masks_in_turns(path):
    """One program for masks of one size: a call finds nothing of the one before in what it works in."""
    rng = np.random.default_rng(5)
    orders = [
        [masks.causal(int(length)) for length in rng.permutation(LENGTHS * 4)] for _ in range(3)
    ]
    tables = [magi_jax.slice_table(masks.concatenate(parts)) for parts in orders]
    spec = functools.reduce(lambda a, b: a.union(b), (table.spec for table in tables))
    tables = [magi_jax.slice_table(masks.concatenate(parts), spec=spec) for parts in orders]
    rows = 4 * sum(LENGTHS)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((rows, heads, 128)), jnp.bfloat16)
        for heads in (16, 4, 4, 16)
    )
    wanted = [in_float64(parts, q, k, v, dout) for parts in orders]
    for _ in range(2):
        for table, want in zip(tables, wanted, strict=True):
            for x, y in zip(gradients(path, q, k, v, dout, table), want, strict=True):
                error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
                assert error < 8e-3, f"{error:.2e}"


def found_and_wanted(path, parts, q, k, v, dout):
    """dq, dk and dv of documents, those of `path` and those in float64."""
    table = magi_jax.slice_table(masks.concatenate(parts))
    got = [np.asarray(x, np.float64) for x in gradients(path, q, k, v, dout, table)]
    assert all(np.isfinite(x).all() for x in got)
    return got, in_float64(parts, q, k, v, dout)


def in_float64(parts, q, k, v, dout):
    """dq, dk and dv of documents one after the other."""
    want = [np.zeros(x.shape) for x in (q, k, v)]
    query = key = 0
    for part in parts:
        rows, keys = slice(query, query + part.q_len), slice(key, key + part.k_len)
        query, key = rows.stop, keys.stop
        arrays = [np.asarray(x, np.float64) for x in (q[rows], k[keys], v[keys], dout[rows])]
        found = oracle.attention_grads(
            *arrays[:3], part.dense(), arrays[3], np.zeros(arrays[0].shape[:2]), scale=SCALE
        )
        want[0][rows], want[1][keys], want[2][keys] = found.dq, found.dk, found.dv
    return want
