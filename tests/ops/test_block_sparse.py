"""Masks of whole blocks that are known on the device only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ops_problem as problem
import pytest
from jax.sharding import AxisType, PartitionSpec

from magi_jax import flex_flash_attention
from magi_jax.ops import block_sparse_table
from magi_jax.ops.reference import dense_mask
from magi_jax.testing import oracle

# (q_len, k_len, block_size, tile_size): tiles of one block, of many, of parts of blocks that are no
# multiple; short last blocks and tiles; a single block.
LAYOUTS = [
    (512, 512, 128, 128),
    (700, 500, (256, 128), 128),
    (331, 450, (64, 32), 128),
    (300, 211, (48, 80), 64),
    (200, 200, (7, 200), 128),
    (5, 9, 16, 128),
]


def dense(visible, q_len, k_len, block_size, causal):
    q_block, k_block = block_size if isinstance(block_size, tuple) else (block_size,) * 2
    cells = visible.repeat(q_block, 0)[:q_len].repeat(k_block, 1)[:, :k_len]
    return cells & np.tri(q_len, k_len, dtype=bool) if causal else cells


def blocks_of(q_len, k_len, block_size):
    q_block, k_block = block_size if isinstance(block_size, tuple) else (block_size,) * 2
    return -(-q_len // q_block), -(-k_len // k_block)


@functools.partial(jax.jit, static_argnames=("layout", "causal", "cap"))
def run(q, k, v, dout, dlse, blocks, *, layout, causal, cap=None):
    """Results and gradients, with the table built in the same program."""
    q_len, k_len, block_size, tile_size = layout
    table = block_sparse_table(blocks, block_size, q_len, k_len, causal=causal, tile_size=tile_size)

    def attend(q, k, v):
        return flex_flash_attention(q, k, v, table, return_residual=True, logits_soft_cap=cap)

    results, pull_back = jax.vjp(attend, q, k, v)
    return results, pull_back((dout, dlse)), table


def check(inputs, blocks, cells, layout, causal, **options):
    (out, lse), gradients, table = run(*inputs, blocks, layout=layout, causal=causal, **options)
    np.testing.assert_array_equal(dense_mask(table), cells)
    wide = [np.asarray(x, np.float64) for x in inputs]
    options = {"logits_soft_cap": options.get("cap")}
    right_out, right_lse = oracle.attention(*wide[:3], cells, **options)
    wide[4] = np.where(np.isinf(right_lse), 0, wide[4])
    right = oracle.attention_grads(*wide[:3], cells, *wide[3:], **options)
    problem.assert_close(out, right_out, 3e-6, "out")
    problem.assert_close(lse, right_lse, 3e-6, "lse")
    for name, got, want in zip(("dq", "dk", "dv"), gradients, right[:3], strict=True):
        problem.assert_close(got, want, 3e-6, name)


@pytest.mark.parametrize(
    ("layout", "causal"), list(zip(LAYOUTS, [True, False] * 3, strict=True)), ids=str
)
def test_random_blocks(layout, causal, rng):
    """Chances from none to all: rows without keys, full runs of several blocks, holes."""
    q_len, k_len, block_size, _ = layout
    inputs = problem.tensors(rng, problem.Heads(2, 1, 8, 8), q_len=q_len, k_len=k_len)
    for chance in (0.0, 0.4, 1.0):
        visible = rng.random(blocks_of(q_len, k_len, block_size)) < chance
        cells = dense(visible, q_len, k_len, block_size, causal)
        check(inputs, visible, cells, layout, causal)


def test_chosen_indices(rng):
    """The top blocks of every query block, some chosen twice and some not at all."""
    layout = q_len, k_len, block_size, _ = LAYOUTS[2]
    num_q, num_k = blocks_of(q_len, k_len, block_size)
    inputs = problem.tensors(rng, problem.Heads(2, 2, 8, 8), q_len=q_len, k_len=k_len)
    blocks = rng.integers(-2, num_k + 1, (num_q, 5))
    visible = np.zeros((num_q, num_k), bool)
    for row, chosen in enumerate(blocks):
        visible[row, [c for c in chosen if 0 <= c < num_k]] = True
    # Causal masks hide the last blocks, which no index below 0 may choose.
    for causal in (True, False):
        cells = dense(visible, q_len, k_len, block_size, causal)
        check(inputs, blocks, cells, layout, causal, cap=5.0)


def test_indices_of_64_bits_choose_what_they_say():
    with jax.enable_x64(True):
        table = block_sparse_table(jnp.array([[2**32], [2**32 + 1], [1], [-(2**32)]]), 2, 8)
        assert dense_mask(table).sum(axis=1).tolist() == [0, 0, 0, 0, 2, 2, 0, 0]


def test_a_new_choice_compiles_nothing(rng):
    """Top blocks by a score that the program computes itself, differentiated through the values."""
    layout, traces = LAYOUTS[0], []
    q, k, v, dout, _ = problem.tensors(rng, problem.Heads(2, 2, 8, 8), q_len=512, k_len=512)

    @jax.jit
    def step(q, k, v):
        traces.append(1)
        pooled = [x.reshape(4, 128, -1).mean(1) for x in (q, k)]
        _, top = jax.lax.top_k(pooled[0] @ pooled[1].T, 2)
        table = block_sparse_table(top, layout[2], 512)
        loss = lambda q, k, v: (flex_flash_attention(q, k, v, table) * dout).sum()  # noqa: E731
        return top, jax.grad(loss, (0, 1, 2))(q, k, v)

    for scale in (1.0, -1.0):
        top, gradients = step(scale * q, k, v)
        visible = np.zeros((4, 4), bool)
        np.put_along_axis(visible, np.asarray(top), True, axis=1)
        wide = [np.asarray(x, np.float64) for x in (scale * q, k, v)]
        right = oracle.attention_grads(
            *wide, dense(visible, 512, 512, 128, False), np.asarray(dout, np.float64)
        )
        for name, got, want in zip(("dq", "dk", "dv"), gradients, right[:3], strict=True):
            problem.assert_close(got, want, 3e-6, name)
    assert len(traces) == 1


def test_sequences_of_a_sharded_batch_choose_their_own(rng):
    """Tables are built under vmap and where JAX tracks what varies between devices."""
    q, k, v = (jnp.asarray(rng.standard_normal((4, 96, 2, 8)), jnp.float32) for _ in range(3))
    blocks = rng.integers(0, 4, (4, 4, 2))

    def attend(blocks, q, k, v):
        table = block_sparse_table(blocks, 24, 96, causal=True)
        return flex_flash_attention(q, k, v, table)

    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Auto,), devices=jax.devices()[:2])
    rows = PartitionSpec("dp")
    sharded = jax.shard_map(jax.vmap(attend), mesh=mesh, in_specs=rows, out_specs=rows)
    loss = jax.grad(lambda q: (sharded(blocks, q, k, v) ** 2).sum())
    got = jax.jit(loss)(q)
    for b in range(4):
        visible = np.zeros((4, 4), bool)
        np.put_along_axis(visible, blocks[b], True, axis=1)
        cells = dense(visible, 96, 96, 24, True)
        wide = [np.asarray(x[b], np.float64) for x in (q, k, v)]
        out, _ = oracle.attention(*wide, cells)
        problem.assert_close(got[b], oracle.attention_grads(*wide, cells, 2 * out).dq, 1e-5, "dq")


def test_a_tile_of_seen_blocks_needs_no_mask():
    """Blocks that a whole tile sees are marked so, and neighbours are one run."""
    visible = np.zeros((4, 8), bool)
    visible[1, [0, 2, 3, 4, 6]] = True
    table = jax.jit(lambda visible: block_sparse_table(visible, 128, 512, 1024))(visible)
    assert table.by_query.ptr.tolist() == [0, 0, 3, 3, 3]
    assert table.by_query.runs[:3, :4].tolist() == [
        [0, 128, 0, 128],
        [256, 640, 256, 640],
        [768, 896, 768, 896],
    ]
    assert table.by_query.order[0] == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((np.zeros((4, 3), bool), 128, 512), r"blocks must be bool \[4, 4\], got \[4, 3\]"),
        ((np.zeros((3, 4), np.int32), 128, 512), r"integer \[4, X\]; got int32 \[3, 4\]"),
        ((np.zeros((4, 4), np.float32), 128, 512), r"bool \[4, 4\] or integer .* got float32"),
        ((np.zeros((4, 4), bool), 0, 512), r"must be positive; got q_len=512 .*block_size=0"),
    ],
)
def test_refusals(arguments, match):
    with pytest.raises(ValueError, match=match):
        block_sparse_table(*arguments)
