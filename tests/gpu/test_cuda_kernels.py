"""Kernels on the device against float64: every mask, head dim and option, and what must not leak."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import PATHS, Case, check, expected, run

import magi_jax
from magi_jax import masks
from magi_jax.ops import BackwardOperands, cuda
from magi_jax.plan import slice_table
from magi_jax.testing.cases import mask_cases, random_mask

HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]

paths = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)


def supported(path, case):
    """Cases of a path: Hopper's kernels need tiles of certain sizes, and say so."""
    q, k, v, *_ = case.operands()
    try:
        path.describe(q, k, v, slice_table(case.mask, tile_size=case.tile_size))
    except NotImplementedError:
        if path.name == "sm80":
            raise
        return False
    return True


@paths
@pytest.mark.parametrize("name", mask_cases(331))
def test_masks(path, name):
    case = Case(mask_cases(331)[name])
    check(run(path, case), expected(case), case.dtype)


@paths
@pytest.mark.parametrize("seed", range(12))
def test_random_masks(path, seed):
    rng = np.random.default_rng(seed)
    q_len, k_len = (int(x) for x in rng.integers(1, 700, 2))
    heads = [(1, 1), (4, 1), (6, 3), (8, 2)][seed % 4]
    case = Case(
        random_mask(rng, q_len, k_len),
        dtype=("bfloat16", "float16")[seed % 2],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        seed=seed,
    )
    check(run(path, case), expected(case), case.dtype)


@paths
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), HEAD_DIMS)
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_head_dims(path, dtype, head_dim, v_head_dim, cap):
    mask = masks.varlen([70, 1, 200, 62], causal=True, window=(90, 0))
    case = Case(mask, dtype=dtype, head_dim=head_dim, v_head_dim=v_head_dim, logits_soft_cap=cap)
    check(run(path, case), expected(case), dtype)


@paths
@pytest.mark.parametrize(("head_dim", "v_head_dim"), HEAD_DIMS)
def test_random_masks_of_all_head_dims(path, head_dim, v_head_dim):
    rng = np.random.default_rng(head_dim)
    for q_len, k_len in rng.integers(1, 500, (3, 2)):
        mask = random_mask(rng, int(q_len), int(k_len))
        case = Case(mask, head_dim=head_dim, v_head_dim=v_head_dim, seed=int(q_len))
        check(run(path, case), expected(case), case.dtype)


@paths
def test_many_queries_of_few_keys(path):
    """The backward on Hopper cuts walks of this length; those of many slices stay whole."""
    rng = np.random.default_rng(0)
    for mask in (masks.causal(40001, 130, offset=-5000), random_mask(rng, 40001, 130, 60)):
        case = Case(mask, num_heads=2, num_kv_heads=1)
        check(run(path, case), expected(case), case.dtype)


@paths
@pytest.mark.parametrize("scale", [-0.1, 0.0, 0.5])
def test_scales(path, scale):
    case = Case(masks.causal(150), scale=scale)
    check(run(path, case), expected(case), case.dtype)


@paths
@pytest.mark.parametrize("tile_size", [64, 128, 256, 384])
def test_tile_sizes(path, tile_size):
    case = Case(masks.varlen([200, 333], causal=True), tile_size=tile_size)
    if supported(path, case):
        check(run(path, case), expected(case), case.dtype)


@paths
def test_long_sequence(path):
    mask = masks.varlen([1500, 20, 900, 676], causal=True, window=(700, 0))
    case = Case(mask, num_heads=4, num_kv_heads=1)
    check(run(path, case), expected(case), case.dtype)


@paths
@pytest.mark.parametrize("seed", range(6))
def test_more_queries_than_a_short_run(path, seed):
    """Hopper's backward walks them in blocks of 64 or 80, as the runs of the table are short or long."""
    rng = np.random.default_rng(seed)
    q_len = (2079, 2080, 2081, 2479, 2050, 2100)[seed]
    num_heads, num_kv_heads = [(1, 1), (6, 2), (8, 1)][seed % 3]
    case = Case(
        random_mask(rng, q_len, int(rng.integers(1, 400)), 20),
        dtype=("bfloat16", "float16")[seed % 2],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seed=seed,
    )
    check(run(path, case), expected(case), case.dtype)


@paths
def test_results_are_the_same_bits_in_every_run(path):
    case = Case(masks.varlen([300, 723], causal=True), num_heads=16, num_kv_heads=2)
    first = run(path, case)
    for _ in range(3):
        for name, again in run(path, case).items():
            if name in ("dq", "dk", "dv") and not path.is_deterministic:
                continue
            np.testing.assert_array_equal(again, first[name], err_msg=name)


@paths
def test_accumulates_in_place(path):
    mask = masks.varlen([200, 1, 130], causal=True)
    left, right = (mask.crop((0, 331), part) for part in ((0, 150), (150, 331)))
    case = Case(mask)
    q, k, v, *_ = case.operands()

    @jax.jit
    def staged(q, k, v, tables):
        first = path.forward(q, k[:150], v[:150], tables[0], out_dtype=jnp.float32, **case.options)
        return path.forward(q, k[150:], v[150:], tables[1], accumulate=first, **case.options)

    out, lse = staged(q, k, v, [slice_table(part) for part in (left, right)])
    assert out.dtype == jnp.float32
    want = expected(case)
    np.testing.assert_allclose(lse, want["lse"], atol=2e-3)
    assert np.linalg.norm(out - want["out"]) < 6e-3 * np.linalg.norm(want["out"])


@paths
@pytest.mark.parametrize("kind", ["window", "documents"])
def test_gradients_of_other_tiles_stay(path, kind):
    """dQ in the dtype of q by two calls that write tiles of queries of their own; others are not written."""
    T = 3000
    if kind == "window":
        mask = masks.local(T, window=(200, 30))
    else:
        mask = masks.varlen([40, 130, 1, 200, 129] * 6, causal=True)
    owned = (range(0, T // 128, 3), range(1, T // 128, 3))  # every third tile is nobody's
    rows = [[masks.global_rows(T, T, rows=(128 * m, 128 * m + 128)) for m in o] for o in owned]
    parts = [mask & functools.reduce(operator.or_, tiles) for tiles in rows]
    case = Case(parts[0] | parts[1], num_heads=32, num_kv_heads=4)
    q, k, v, dout, dlse = case.operands()

    @jax.jit
    def by_tiles(dq, tables, whole):
        lse = path.forward(q, k, v, whole, **case.options)[1]
        operands = BackwardOperands(dout, q, k, v, lse, dlse)
        for table in tables:
            dq, *_ = path.backward(
                operands,
                table,
                accumulate=dq,
                dq_dtype=q.dtype,
                dkv_dtype=jnp.float32,
                **case.options,
            )
        return dq, path.backward(operands, whole, **case.options)[0]

    given = jnp.full(q.shape, 7.0, q.dtype)
    dq, want = by_tiles(given, [slice_table(part) for part in parts], slice_table(case.mask))
    written = np.zeros(T, bool)
    for m in (*owned[0], *owned[1]):
        written[128 * m : 128 * m + 128] = True
    np.testing.assert_array_equal(dq[~written], 7.0)
    dq, want = (np.asarray(x[written], np.float64) for x in (dq, want))
    assert np.linalg.norm(dq - want) < 3e-3 * np.linalg.norm(want)


@paths
def test_accumulates_tiles_and_gradients(path):
    """Tiles of queries in turns, in the dtype of q, and dQ of their keys; empty tiles are not written."""
    seen = masks.global_rows(1000, 1000, rows=(0, 896))
    mask = masks.local(1000, window=(200, 0)) & seen
    parts = [mask & masks.global_rows(1000, 1000, rows=rows) for rows in ((0, 512), (512, 896))]
    case = Case(mask, num_heads=16, num_kv_heads=2)
    q, k, v, dout, dlse = case.operands()
    results = (jnp.zeros(dout.shape, q.dtype), jnp.full(dlse.shape, -jnp.inf))
    results = tuple(x.at[896:].set(7.0) for x in results)

    @jax.jit
    def staged(results, tables, whole):
        dq, found = None, []
        lse = path.forward(q, k, v, whole, **case.options)[1]
        for table in tables:
            results = path.forward(q, k, v, table, accumulate=results, **case.options)
            operands = BackwardOperands(dout, q, k, v, lse, dlse)
            dq, *dkv = path.backward(operands, table, accumulate=dq, **case.options)
            found.append(dkv)
        return results, dq, found

    @jax.jit
    def at_once(table):
        out, lse = path.forward(q, k, v, table, **case.options)
        operands = BackwardOperands(dout, q, k, v, lse, dlse)
        return out, lse, path.backward(operands, table, **case.options)

    (out, lse), dq, found = staged(
        results, [slice_table(part) for part in parts], slice_table(mask)
    )
    np.testing.assert_array_equal(out[896:], 7.0)
    np.testing.assert_array_equal(lse[896:], 7.0)
    want_out, want_lse, gradients = at_once(slice_table(mask))
    np.testing.assert_array_equal(out[:896], want_out[:896])
    np.testing.assert_array_equal(lse[:896], want_lse[:896])
    sums = (dq, *map(sum, zip(*found, strict=True)))
    for name, got, want in zip("qkv", sums, gradients, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.linalg.norm(got - want) < 6e-3 * np.linalg.norm(want), name


@paths
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("first", "head_dim", "v_head_dim"),
    [(90, 64, 64), (90, 128, 128), (90, 256, 256), (2010, 128, 128)],
)
def test_hidden_rows_do_not_leak(path, bad, first, head_dim, v_head_dim):
    """Rows of one document hold NaN or inf; the others share tiles with it and must not notice."""
    mask = masks.varlen([first, 75, 160], causal=True)
    case = Case(mask, head_dim=head_dim, v_head_dim=v_head_dim)
    clean = expected(case)
    q, k, v, dout, dlse = case.operands()
    spoiled = [x.at[first : first + 75].set(bad) for x in (q, k, v, dout)]
    got = run(path, case, (*spoiled, dlse))
    rows = np.r_[0:first, first + 75 : first + 235]
    for name, value in got.items():
        error = np.linalg.norm(value[rows] - clean[name][rows])
        assert error < 6e-3 * np.linalg.norm(clean[name][rows]), name


@paths
def test_seen_rows_do_spoil(path):
    case = Case(masks.causal(100))
    q, k, v, dout, dlse = case.operands()
    got = run(path, case, (q, k, v.at[40].set(np.nan), dout, dlse))
    assert np.isnan(got["out"][40:]).all()
    assert np.isfinite(got["out"][:40]).all()


@paths
def test_hostile_tables_touch_no_foreign_memory(path):
    """Values of a table cannot be checked on the host; whatever they are, the call must return."""
    case = Case(masks.varlen([200, 131], causal=True))
    q, k, v, dout, dlse = case.operands()
    table = slice_table(case.mask)
    rng = np.random.default_rng(0)
    for low, high in ((-400, 800), (-(2**31), 2**31 - 1)):
        hostile = jax.tree.map(
            lambda leaf: rng.integers(low, high, leaf.shape, np.int32, True),  # noqa: B023
            table,
        )
        out, lse = path.forward(q, k, v, hostile, **case.options)
        operands = BackwardOperands(dout, q, k, v, lse, dlse)
        grads = path.backward(operands, hostile, **case.options)
        jax.block_until_ready((out, grads))
    check(run(path, case), expected(case), case.dtype)


def test_gradients_through_the_public_function():
    case = Case(masks.varlen([120, 99, 112], causal=True), num_heads=8, num_kv_heads=2)
    q, k, v, dout, dlse = case.operands()

    def loss(q, k, v):
        out, lse = magi_jax.flex_flash_attention(q, k, v, case.mask, return_residual=True)
        return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32)) + jnp.sum(lse * dlse)

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    want = expected(case)
    for name, value in zip(("dq", "dk", "dv"), got, strict=True):
        error = np.linalg.norm(np.asarray(value, np.float64) - want[name])
        assert error < 8e-3 * np.linalg.norm(want[name]), name


def test_the_device_chooses_its_kernels():
    chosen = cuda.for_capability(cuda.device_capability())
    assert chosen.forward_paths[-1] == "sm80"
    case = Case(masks.causal(64))
    q, k, v, *_ = case.operands()
    assert len(chosen.describe(q, k, v, slice_table(case.mask)).splitlines()) == 2


def test_float32_is_refused_with_what_is_accepted():
    q = jnp.zeros((8, 1, 64), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"float32 64/64.*this build has bfloat16 64/64"):
        magi_jax.flex_flash_attention(q, q, q, masks.causal(8), implementation="sm80")
