"""Every implementation computes what the dense float64 oracle does: results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import ops_problem as problem
import pytest

from magi_jax import masks
from magi_jax.ops import BackwardOperands, get_implementation
from magi_jax.plan import slice_table
from magi_jax.testing.cases import random_mask

PLAIN = problem.Heads(2, 2, 32, 32)
LAYOUTS = (
    problem.Heads(4, 2, 24, 40),
    problem.Heads(6, 1, 17, 5),
    problem.Heads(1, 1, 1, 1),
    problem.Heads(2, 1, 128, 64),
)


@pytest.fixture(params=problem.IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("name", problem.all_masks())
def test_every_mask(name, implementation, rng):
    inputs = problem.tensors(rng, PLAIN)
    problem.check_against_oracle(inputs, problem.all_masks()[name], implementation)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["varlen_causal", "window_symmetric", "rows_without_keys"])
def test_head_layouts(name, layout, implementation, rng):
    inputs = problem.tensors(rng, layout)
    problem.check_against_oracle(inputs, problem.all_masks()[name], implementation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["causal", "varlen_causal_short", "nothing_visible"])
def test_narrow_types(name, dtype, implementation, rng):
    inputs = problem.tensors(rng, LAYOUTS[0], dtype)
    problem.check_against_oracle(inputs, problem.all_masks()[name], implementation)


@pytest.mark.parametrize("cap", [0.7, 30.0])
@pytest.mark.parametrize("name", ["full", "varlen_window_causal"])
def test_soft_cap(name, cap, implementation, rng):
    inputs = problem.tensors(rng, PLAIN)
    problem.check_against_oracle(inputs, problem.all_masks()[name], implementation, cap=cap)


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("name", ["varlen_causal", "rows_without_keys", "nothing_visible"])
def test_sinks(name, shape, implementation, rng):
    inputs = problem.tensors(rng, PLAIN)
    sinks = jnp.asarray(rng.standard_normal((*shape, PLAIN.q)), jnp.float32)
    mask = problem.all_masks()[name]
    problem.check_against_oracle(inputs, mask, implementation, sinks=sinks)


def test_random_masks(implementation, rng):
    inputs = problem.tensors(rng, PLAIN)
    spec = problem.shared_spec()
    for _ in range(20):
        mask = random_mask(rng, problem.SIZE, problem.K_SIZE, max_slices=8)
        table = slice_table(mask, spec=spec)
        problem.check_against_oracle(inputs, mask, implementation, table=table)


@pytest.mark.parametrize(
    ("q_len", "k_len"), [(1, 1), (1, 300), (300, 1), (0, 5), (5, 0), (127, 389)]
)
def test_lengths(q_len, k_len, implementation, rng):
    inputs = problem.tensors(rng, PLAIN, q_len=q_len, k_len=k_len)
    mask = masks.causal(q_len, k_len, offset=k_len - q_len)
    problem.check_against_oracle(inputs, mask, implementation, table=slice_table(mask))


@pytest.mark.parametrize("tile_size", [1, 16, 50, 1024])
def test_tile_sizes(tile_size, implementation, rng):
    inputs = problem.tensors(rng, PLAIN)
    mask = problem.all_masks()["varlen_block_causal"]
    table = slice_table(mask, tile_size=tile_size)
    problem.check_against_oracle(inputs, mask, implementation, table=table)


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(4, 1), (16, 16)])
def test_many_tiles_and_heads(num_heads, kv_heads, rng):
    """Several blocks per run, full intervals in the middle. The CPU's backward walks once when there is
    a kv head for each of its threads (16 in tests), and twice otherwise.
    """
    mask = masks.varlen([700, 3, 330], causal=True) | masks.global_rows(1033, rows=(900, 1033))
    heads = problem.Heads(num_heads, kv_heads, 16, 16)
    inputs = problem.tensors(rng, heads, q_len=mask.q_len, k_len=mask.k_len)
    problem.check_against_oracle(inputs, mask, "cpu", table=slice_table(mask))


@pytest.mark.parametrize("name", problem.all_masks())
def test_every_mask_in_one_walk(name, rng):
    """A kv head for each thread, and two query heads for each of them."""
    inputs = problem.tensors(rng, problem.Heads(32, 16, 20, 8))
    problem.check_against_oracle(inputs, problem.all_masks()[name], "cpu")


def test_hidden_keys_do_not_leak_in_one_walk(rng):
    q, k, v, dout, dlse = (np.array(x) for x in problem.tensors(rng, problem.Heads(16, 16, 16, 16)))
    k[100:] = np.nan
    table = problem.table_of(problem.all_masks()["causal"])
    _, (dq, _, _, _) = problem.run(q, k, v, dout, dlse, table, implementation="cpu")
    assert np.isfinite(dq[:100]).all()


def test_large_logits(implementation, rng):
    """Logits of some hundreds: nothing overflows, and weights that vanish are zeros."""
    q, k, v, dout, dlse = problem.tensors(rng, PLAIN)
    inputs = (q * 40, k, v, dout, dlse)
    q, k, v, dout, dlse = inputs
    mask = problem.all_masks()["causal"]
    results, gradients = problem.run(
        q, k, v, dout, dlse, problem.table_of(mask), implementation=implementation
    )
    assert all(np.isfinite(x).all() for x in (*results, *gradients[:3]))
    right, _ = problem.oracle.attention(*map(np.asarray, (q, k, v)), mask.dense())
    # A logit of 300 has 24 bits, so its weight is known to about 300 * 2^-24.
    problem.assert_close(results[0], right, 1e-4, "out")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_values_do_not_leak(value, implementation, rng):
    """Whatever stands in a document, the others do not see it: not in results, nor in gradients."""
    cut = 70
    mask = problem.pad(masks.varlen([cut, problem.SIZE - cut], causal=True))
    clean = [np.array(x) for x in problem.tensors(rng, PLAIN)]
    dirty = [x.copy() for x in clean]
    for x in dirty:
        x[:cut] = value
    table = problem.table_of(mask)
    # A kernel may compute rows again, in another order, when what they do not see is not finite.
    tolerance = problem.TOLERANCE[clean[0].dtype.name]
    for inputs in ((*dirty[:4], clean[4]), (clean[0], *dirty[1:3], *clean[3:])):
        right = problem.run(*clean, table, implementation=implementation)
        seen = problem.run(*inputs, table, implementation=implementation)
        for a, b in zip(jax.tree.leaves(right), jax.tree.leaves(seen), strict=True):
            problem.assert_close(b[cut:], a[cut:], tolerance, "what does not see them")
            assert np.isfinite(b[cut:]).all()


def test_causal_future_does_not_leak(implementation, rng):
    q, k, v, dout, dlse = (np.array(x) for x in problem.tensors(rng, PLAIN))
    k[100:], v[100:] = np.nan, np.inf
    table = problem.table_of(problem.all_masks()["causal"])
    (out, lse), _ = problem.run(q, k, v, dout, dlse, table, implementation=implementation)
    assert np.isfinite(out[:100]).all()
    assert np.isfinite(lse[:100]).all()
    assert np.isnan(out[100:]).all(), "what sees NaN says so"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulate_merges(implementation, dtype, rng):
    """Two halves of the keys, one after the other, give the whole; an empty half changes nothing. The largest
    logits are those of each half.
    """
    q, k, v, *_ = problem.tensors(rng, PLAIN, dtype)
    mask, cut = problem.all_masks()["rows_without_keys"], 40
    size = problem.SIZE, problem.K_SIZE
    left = mask & masks.global_columns(*size, columns=(0, cut))
    right = mask & masks.global_columns(*size, columns=(cut, size[1]))
    kernel = get_implementation(implementation)

    @jax.jit
    def attend(q, k, v, tables):
        options = {"scale": 0.3, "logits_soft_cap": 0.0, "with_row_max": True}
        *partial, top = kernel.forward(q, k, v, tables[0], out_dtype=jnp.float32, **options)
        tops = [top]
        for table in tables[1:]:
            *partial, top = kernel.forward(q, k, v, table, accumulate=tuple(partial), **options)
            tops.append(top)
        return partial, tops

    parts = [left, right, masks.empty(*size)]
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    right_out, right_lse = problem.oracle.attention(*wide, mask.dense(), scale=0.3)
    logits = 0.3 * np.einsum("tnh,snh->nts", wide[0], wide[1].repeat(PLAIN.q // PLAIN.kv, axis=1))
    for order in (parts, parts[::-1]):
        (out, lse), tops = attend(q, k, v, [problem.table_of(part) for part in order])
        assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
        problem.assert_close(out, right_out, 3e-6 if dtype == "float32" else 6e-3, "out")
        problem.assert_close(lse, right_lse, 3e-6, "lse")
        for top, part in zip(tops, order, strict=True):
            largest = np.where(part.dense(), logits, -np.inf).max(axis=2).T
            problem.assert_close(top, largest, 3e-6, "largest logits")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulate_keeps_other_tiles(implementation, dtype, rng):
    """Tiles of queries in turns, in the dtype of q; those that see nothing in a call are not written."""
    q, k, v, *_ = problem.tensors(rng, PLAIN, dtype)
    T, S, tile = problem.SIZE, problem.K_SIZE, 64
    mask = problem.all_masks()["varlen_causal"] & masks.global_rows(T, S, rows=(0, 2 * tile))
    parts = [mask & masks.global_rows(T, S, rows=rows) for rows in ((0, tile), (tile, T))]
    kernel = get_implementation(implementation)

    @jax.jit
    def attend(q, k, v, tables, results):
        for table in tables:
            options = {"scale": 0.3, "logits_soft_cap": 0.0}
            results = kernel.forward(q, k, v, table, accumulate=results, **options)
        return results

    empty = np.zeros((T, PLAIN.q, PLAIN.v_dim)), np.full((T, PLAIN.q), -np.inf)
    for value in empty:
        value[2 * tile :] = rng.normal(size=value[2 * tile :].shape)
    tables = [slice_table(part, tile_size=tile) for part in parts]
    given = (jnp.asarray(empty[0], q.dtype), jnp.asarray(empty[1], jnp.float32))
    out, lse = attend(q, k, v, tables, given)
    assert out.dtype == q.dtype
    for found, before in zip((out, lse), given, strict=True):  # bit for bit
        np.testing.assert_array_equal(found[2 * tile :], before[2 * tile :])
    wide = (np.asarray(x, np.float64) for x in (q, k, v))
    want_out, want_lse = problem.oracle.attention(*wide, mask.dense(), scale=0.3)
    want_out[2 * tile :], want_lse[2 * tile :] = given[0][2 * tile :], given[1][2 * tile :]
    problem.assert_close(out, want_out, 3e-6 if dtype == "float32" else 6e-3, "out")
    problem.assert_close(lse, want_lse, 3e-6, "lse")


def test_gradients_accumulate(implementation, rng):
    check_accumulated_gradients(rng, LAYOUTS[0], implementation)


def test_gradients_accumulate_in_one_walk(rng):
    check_accumulated_gradients(rng, problem.Heads(16, 16, 16, 16), "cpu")


def check_accumulated_gradients(rng, heads, implementation):
    """dQ of two halves of the keys, one call after the other."""
    q, k, v, dout, dlse = problem.tensors(rng, heads)
    mask, cut = problem.all_masks()["rows_without_keys"], 40
    size = problem.SIZE, problem.K_SIZE
    parts = [mask & masks.global_columns(*size, columns=c) for c in ((0, cut), (cut, size[1]))]
    kernel, options = get_implementation(implementation), {"scale": 0.3, "logits_soft_cap": 0.0}

    @jax.jit
    def gradients(q, k, v, dout, dlse, whole, tables):
        out, lse = kernel.forward(q, k, v, whole, **options)
        delta = jnp.sum(dout * out, axis=-1) - dlse
        dq, found = None, []
        for table in tables:
            operands = BackwardOperands(dout, q, k, v, lse, delta)
            dq, *dkv = kernel.backward(operands, table, accumulate=dq, **options)
            found.append(dkv)
        return dq, found

    tables = [problem.table_of(part) for part in parts]
    dq, found = gradients(q, k, v, dout, dlse, problem.table_of(mask), tables)
    arrays = [np.asarray(x, np.float64) for x in (q, k, v)]
    _, lse = problem.oracle.attention(*arrays, mask.dense(), scale=0.3)
    dlse = np.where(np.isneginf(lse), 0.0, dlse)
    want = problem.oracle.attention_grads(*arrays, mask.dense(), dout, dlse, scale=0.3)
    problem.assert_close(dq, want.dq, 1e-5, "dq")
    for name, parts in zip(("dk", "dv"), zip(*found, strict=True), strict=True):
        problem.assert_close(sum(parts), getattr(want, name), 1e-5, name)


def test_gradients_of_other_tiles_stay(implementation, rng):
    """dQ of tiles of queries in turns, in a short dtype, where each tile is written by one call alone."""
    q, k, v, dout, _ = problem.tensors(rng, LAYOUTS[0])
    q, k, v, dout = (x.astype("bfloat16") for x in (q, k, v, dout))
    size, tile = (problem.SIZE, problem.K_SIZE), 64
    mask = problem.all_masks()["varlen_causal"]
    parts = [mask & masks.global_rows(*size, rows=rows) for rows in ((tile, 2 * tile), (0, tile))]
    tables = [slice_table(part, tile_size=tile) for part in parts]
    kernel, options = get_implementation(implementation), {"scale": 0.3, "logits_soft_cap": 0.0}

    @jax.jit
    def gradients(q, k, v, dout, whole, tables, dq):
        out, lse = kernel.forward(q, k, v, whole, out_dtype=jnp.float32, **options)
        delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1)
        operands = BackwardOperands(dout, q, k, v, lse, delta)
        for table in tables:
            dq, *_ = kernel.backward(operands, table, accumulate=dq, dq_dtype=q.dtype, **options)
        return dq

    given = jnp.full(q.shape, 7.0, q.dtype)
    dq = gradients(q, k, v, dout, slice_table(mask, tile_size=tile), tables, given)
    assert dq.dtype == q.dtype
    arrays = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    dlse = np.zeros(dout.shape[:2])
    want = problem.oracle.attention_grads(*arrays[:3], mask.dense(), arrays[3], dlse, scale=0.3).dq
    want[2 * tile :] = 7.0
    problem.assert_close(dq, want, 6e-3, "dq")


def test_repeats_give_equal_bits(implementation, rng):
    inputs = problem.tensors(rng, LAYOUTS[0])
    table = problem.table_of(problem.all_masks()["block_causal_global"])
    first, second = (problem.run(*inputs, table, implementation=implementation) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
