"""Masks for groups of heads, and batches whose rows have masks of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import ops_problem as problem
import pytest

from magi_jax import flex_flash_attention, masks
from magi_jax.ops.reference import dense_mask
from magi_jax.ops.repeat_table import repeat_table
from magi_jax.plan import slice_table
from magi_jax.testing import oracle
from magi_jax.testing.cases import random_mask

SIZE = 90


@pytest.mark.parametrize("implementation", problem.IMPLEMENTATIONS)
def test_masks_for_groups_of_heads(implementation, rng):
    each = [random_mask(rng, SIZE, SIZE, 7) for _ in range(2)]
    q, k, v, dout, dlse = problem.tensors(rng, problem.Heads(8, 4, 16, 8), q_len=SIZE, k_len=SIZE)
    sinks = jnp.asarray(rng.standard_normal((2, 8)), jnp.float32)
    tables = [slice_table(mask) for mask in each]

    @jax.jit
    def run(q, k, v, sinks, tables):
        def attend(q, k, v, sinks):
            return flex_flash_attention(
                q,
                k,
                v,
                tables,
                sinks=sinks,
                return_residual=True,
                return_max_logits=True,
                implementation=implementation,
            )

        results, pull_back = jax.vjp(attend, q, k, v, sinks)
        return results, pull_back((dout, dlse, jnp.zeros(8)))

    (out, lse, max_logits), gradients = run(q, k, v, sinks, tables)
    for g, mask in enumerate(each):
        heads, kv = slice(4 * g, 4 * g + 4), slice(2 * g, 2 * g + 2)
        inputs = [np.asarray(x, np.float64) for x in (q[:, heads], k[:, kv], v[:, kv])]
        part = np.asarray(sinks)[:, heads]
        right = oracle.attention(*inputs, mask.dense(), sinks=part)
        problem.assert_close(out[:, heads], right[0], 3e-6, "out")
        problem.assert_close(lse[:, heads], right[1], 3e-6, "lse")
        logits = np.einsum("tnh,snh->nts", inputs[0], inputs[1].repeat(2, 1)) * 16**-0.5
        largest = np.where(mask.dense(), logits, -np.inf).max((1, 2), initial=-np.inf)
        problem.assert_close(max_logits[heads], largest, 3e-6, "max_logits")
        cotangents = (np.asarray(x, np.float64)[:, heads] for x in (dout, dlse))
        wanted = oracle.attention_grads(*inputs, mask.dense(), *cotangents, sinks=part)
        for name, got, want, of in zip(
            ("dq", "dk", "dv", "dsinks"), gradients, wanted, (heads, kv, kv, heads), strict=True
        ):
            problem.assert_close(got[:, of], want, 3e-5, name)


def test_groups_that_do_not_divide_the_heads_are_refused():
    x = jnp.zeros((8, 3, 4))
    for each in ([masks.causal(8)] * 2, []):
        with pytest.raises(ValueError, match=f"{len(each)} masks are for .* but k has 3 heads"):
            flex_flash_attention(x, x, x, each)


def test_rows_of_a_batch_with_masks_of_their_own(rng):
    """A mask of all tokens makes the batch one packed stream; of one row it is shared."""
    rows = [random_mask(rng, 40, 60, 6) for _ in range(4)]
    shapes = ((2, 2, 40, 4, 8), (2, 2, 60, 2, 8), (2, 2, 60, 2, 8))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    out, lse, top = flex_flash_attention(
        q, k, v, masks.concatenate(rows), return_residual=True, return_max_logits=True
    )
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]
    tops = []
    for i, mask in enumerate(rows):
        at = divmod(i, 2)
        right = oracle.attention(q[at], k[at], v[at], mask.dense())
        problem.assert_close(out[at], right[0], 3e-6, "out")
        problem.assert_close(lse[at], right[1], 3e-6, "lse")
        shared = flex_flash_attention(q, k, v, mask, return_max_logits=True)
        problem.assert_close(shared[0][at], right[0], 3e-6, "out under a shared mask")
        tops.append(flex_flash_attention(q[at], k[at], v[at], mask, return_max_logits=True)[1])
    problem.assert_close(top, np.max(tops, axis=0), 3e-6, "max_logits")


@pytest.mark.parametrize("visible", [True, False])
def test_a_shared_table_of_whole_tiles_serves_a_batch_at_once(visible, rng):
    """The table of the batch is made of that of a row on the device, and shows the same cells."""
    mask = random_mask(rng, 192, 128, 9) if visible else masks.empty(192, 128)
    table = slice_table(mask, tile_size=64)
    assert len(table.by_query.runs) > table.by_query.ptr[-1], "has no padding to leave out"
    repeated = jax.jit(lambda table: repeat_table(table, 3))(table)
    wanted = slice_table(masks.concatenate([mask] * 3), tile_size=64)
    np.testing.assert_array_equal(dense_mask(repeated), dense_mask(wanted))
    for got, want in ((repeated.by_query, wanted.by_query), (repeated.by_key, wanted.by_key)):
        assert got.ptr.tolist() == want.ptr.tolist()
        used = want.ptr[-1]
        np.testing.assert_array_equal(got.runs[:used, :4], want.runs[:used, :4])
        assert sorted(got.order.tolist()) == list(range(len(want.order)))
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((3, 192, 4, 8), (3, 128, 2, 8), (3, 128, 2, 8))
    )

    @jax.jit
    def run(q, k, v, table):
        loss = lambda q, k, v: (flex_flash_attention(q, k, v, table) ** 2).sum()  # noqa: E731
        return flex_flash_attention(q, k, v, table), jax.grad(loss, (0, 1, 2))(q, k, v)

    assert "scan" not in str(jax.make_jaxpr(run)(q, k, v, table)), "one sequence after the other"
    out, gradients = run(q, k, v, table)
    for b in range(3):
        right, _ = oracle.attention(q[b], k[b], v[b], mask.dense())
        problem.assert_close(out[b], right, 3e-6, "out")
        wide = [np.asarray(x[b], np.float64) for x in (q, k, v)]
        wanted_gradients = oracle.attention_grads(*wide, mask.dense(), 2 * right)
        for name, got, want in zip(
            ("dq", "dk", "dv"), gradients, wanted_gradients[:3], strict=True
        ):
            problem.assert_close(got[b], want, 1e-5, name)


def test_functions_of_positions_are_refused_with_what_to_do():
    x = jnp.zeros((8, 2, 4))
    with pytest.raises(TypeError, match=r"called for each of T x S cells; say with magi_jax.masks"):
        flex_flash_attention(x, x, x, lambda q, k: q >= k)
    with pytest.raises(TypeError, match=r"got ndarray; .*masks.from_dense"):
        flex_flash_attention(x, x, x, np.ones((8, 8), bool))
