"""Tiles of keys that walk many queries, in the longer blocks of Hopper's backward, against float64."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import TOLERANCE, Case, expected, needs_hopper

from magi_jax import masks
from magi_jax.ops import cuda
from magi_jax.plan import slice_table

pytestmark = needs_hopper
KEYS = 300


def long_run(q_len: int, rng: np.random.Generator) -> masks.AttnMask:
    """Rows of many slices without a gap, so that each tile of keys has one run."""
    ends = [0, *sorted(rng.choice(np.arange(1, q_len), 3, replace=False)), q_len]
    parts = []
    for first, end in itertools.pairwise(ends):
        rows = int(end - first)
        part = masks.causal(rows, KEYS, offset=int(rng.integers(260, 300)))
        part = part if rng.integers(2) else masks.full(rows, KEYS)
        parts.append(part.shift(int(first), 0, q_len, KEYS))
    return functools.reduce(operator.or_, parts)


def gradients(case: Case, table, dq_dtype=None, accumulate=None) -> list[np.ndarray]:
    """dq, dk and dv of path ``sm90``, dq in the dtype of q if no other is given."""
    q, k, v, dout, dlse = case.operands()

    @jax.jit
    def both(q, k, v, dout, dlse, table, accumulate):
        out, lse = cuda.SM90.forward(q, k, v, table, out_dtype=jnp.float32, **case.options)
        delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1) - dlse
        return cuda.SM90.backward(
            dout, q, k, v, lse, delta, table, dq_dtype=dq_dtype or q.dtype, dkv_dtype=jnp.float32,
            accumulate=accumulate, **case.options,
        )  # fmt: skip

    results = both(q, k, v, dout, dlse, table, accumulate)
    return [np.asarray(x.astype(jnp.float32)) for x in results]


def compare(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """Relative error in the 2-norm, of all and of the worst row."""
    assert np.linalg.norm(got - want) < TOLERANCE[dtype] * np.linalg.norm(want)
    rows = np.linalg.norm(got - want, axis=-1).max()
    assert rows < 10 * TOLERANCE[dtype] * np.linalg.norm(want, axis=-1).max()


@pytest.mark.parametrize("q_len", [1600, 1601, 1607, 1608, 2079, 2080, 2081, 2479, 3333])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rounded", [True, False])
def test_gradients(q_len, dtype, rounded):
    rng = np.random.default_rng(q_len)
    num_heads, num_kv_heads = [(2, 2), (6, 2), (8, 1)][q_len % 3]
    case = Case(long_run(q_len, rng), dtype, num_heads, num_kv_heads, seed=q_len)
    got = gradients(case, slice_table(case.mask), None if rounded else jnp.float32)
    want = expected(case)
    for name, values in zip(("dq", "dk", "dv"), got, strict=True):
        compare(values, want[name], dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_of_others_stay(dtype):
    """dQ in the dtype of q of two calls, each with tiles of queries of its own; one is nobody's."""
    q_len = 4000
    rows = [masks.global_rows(q_len, KEYS, rows=part) for part in ((0, 1920), (2048, q_len))]
    parts = [masks.full(q_len, KEYS) & part for part in rows]
    case = Case(parts[0] | parts[1], dtype, num_heads=8, num_kv_heads=2)
    dq = jnp.full((q_len, 8, 128), 7.0, dtype)
    for part in parts:
        part_case = Case(part, dtype, num_heads=8, num_kv_heads=2)
        dq = jnp.asarray(gradients(part_case, slice_table(part), accumulate=dq)[0], dtype)
    dq = np.asarray(dq.astype(jnp.float32))
    np.testing.assert_array_equal(dq[1920:2048], 7.0)
    written = np.r_[0:1920, 2048:q_len]
    compare(dq[written], expected(case)["dq"][written], dtype)


@pytest.mark.parametrize(("rows", "taken"), [(1500, "short_runs"), (1700, "tiles")])
def test_length_of_a_run_decides(rows, taken):
    mask = masks.full(rows, KEYS).shift(200, 0, 2000, KEYS)
    case = Case(mask, num_heads=8, num_kv_heads=2)
    q, k, v, dout, dlse = case.operands()
    for dtype in (jnp.bfloat16, jnp.float32):
        items = cuda.SM90.backward_items(
            dout, q, k, v, dlse, dlse, table=slice_table(mask), dq_dtype=dtype, **case.options
        )
        ran = {name: int(count) > 0 for name, count in items._asdict().items()}
        assert ran == {name: name == taken for name in items._fields}
