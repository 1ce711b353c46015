"""Every known strategy computes exact attention, forward and backward, on the masks that it supports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from baselines import layouts, strategies
from baselines.base import Problem, Strategy

from magi_jax import masks
from magi_jax.testing import oracle

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16
DOCUMENTS = np.array([61, 1, 120, 7, 40, 27])  # long and tiny ones, no multiple of anything


def problems(rng: np.random.Generator) -> dict[str, Problem]:
    lengths = rng.permutation(DOCUMENTS)
    whole = np.array([lengths.sum()])
    return {
        "full": Problem(masks.full(256), whole),
        "causal": Problem(masks.causal(256), whole),
        "varlen_full": Problem(masks.varlen(lengths), lengths),
        "varlen_causal": Problem(masks.varlen(lengths, causal=True), lengths),
        "window": Problem(masks.local(256, window=(20, 5)), whole),
        "block_causal": Problem(masks.uniform_block_causal(lengths, 16), lengths),
    }


def run(strategy: Strategy, problem: Problem, rng: np.random.Generator) -> None:
    shape = problem.mask.q_len, HEADS, HEAD_DIM
    q, dout = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    kv_shape = problem.mask.k_len, KV_HEADS, HEAD_DIM
    k, v = (rng.standard_normal(kv_shape).astype(np.float32) for _ in range(2))
    layout = strategy.layout(problem)
    tables = jax.tree.map(jnp.asarray, strategy.tables(problem))
    attention = strategy.attention(jax.devices())
    sharded = [jnp.asarray(layouts.shard(x, layout)) for x in (q, k, v, dout)]

    def step(q, k, v, dout, tables):
        out, pull = jax.vjp(lambda *x: attention(*x, tables), q, k, v)
        return out, *pull(dout)

    results = jax.jit(step)(*sharded, tables)
    dense = problem.mask.dense()
    grads = oracle.attention_grads(q, k, v, dense, dout)
    expected = (oracle.attention(q, k, v, dense)[0], grads.dq, grads.dk, grads.dv)
    for name, result, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        got = layouts.unshard(np.asarray(result), layout)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("name", ["ulysses", "ring_contiguous", "ring_zigzag", "allgather_zigzag"])
def test_one_axis(name, kind, rng):
    run(strategies.make(name, 4), problems(rng)[kind], rng)


@pytest.mark.parametrize("name", ["usp_zigzag", "loongtrain_zigzag"])
def test_several_axes(name, rng):
    """Two nodes of four ranks: the strategies of two axes use both links."""
    run(strategies.make(name, 8, node=4), problems(rng)["block_causal"], rng)


@pytest.mark.parametrize(
    "name",
    [
        "ring_documents",
        "allgather_documents",
        "usp_documents",
        "loongtrain_documents",
        "hybrid",
        "hybrid_even4",
    ],
)
def test_by_document(name, rng):
    kind = rng.choice(["varlen_full", "varlen_causal"])
    run(strategies.make(name, 8, node=4), problems(rng)[kind], rng)


def test_fewer_ranks_than_kv_heads(rng):
    run(strategies.make("ulysses", 2), problems(rng)["full"], rng)


@pytest.mark.parametrize("name", ["ulysses", "allgather_zigzag", "hybrid"])
def test_one_rank(name, rng):
    run(strategies.make(name, 1), problems(rng)["varlen_causal"], rng)


def test_every_name_is_made_and_others_are_refused():
    for name in strategies.names():
        assert strategies.make(name, 16).num_ranks == 16
    with pytest.raises(ValueError, match="ring_striped"):
        strategies.make("ring_striped", 8)


def test_hybrid_refuses_masks_that_join_documents():
    problem = Problem(masks.causal(64), np.array([32, 32]))
    with pytest.raises(ValueError, match="do not see each other"):
        strategies.make("hybrid", 4).layout(problem)


def test_hybrid_gives_long_documents_more_ranks_and_balances(rng):
    from baselines import hybrid

    lengths = np.array([4096, 1024, 1024, 512, 512, 512, 512])
    placement = hybrid.place(lengths, lengths**2, 8)
    assert placement.size[0] == 8
    assert (placement.first % placement.size == 0).all()
    load = np.zeros(8)
    for size, first, length in zip(*placement, lengths, strict=True):
        load[first : first + size] += length**2 / size
    assert load.max() <= 1.3 * load.mean()


def test_larger_groups_balance_documents_and_their_tokens(rng):
    """Documents of which each is at most a rank's share, in tokens and in area, of a sum that fits nobody."""
    from baselines import hybrid

    lengths = rng.integers(100, 1500, 150)
    area = lengths**2
    worst = {}
    for spread, most_tokens in strategies.HYBRIDS.values():
        size, first = hybrid.place(lengths, area, 16, spread, most_tokens)
        held, load = np.zeros((2, 16))
        for rows, begin, n, cells in zip(size, first, lengths, area, strict=True):
            held[begin : begin + rows] += n / rows
            load[begin : begin + rows] += cells / rows
        np.testing.assert_allclose([held.sum(), load.sum()], [lengths.sum(), area.sum()])
        assert held.max() <= most_tokens * held.mean() * (1 + 1e-9)
        worst[spread] = load.max() / load.mean()
    assert worst[4] <= 1.05


def test_a_document_without_room_takes_more_ranks():
    """Two of three documents fill a rank each: the third has room on both alone."""
    from baselines import hybrid

    size, _ = hybrid.place(np.array([90, 90, 20]), np.array([90, 90, 20]), 2, 1, 1.0)
    assert sorted(size.tolist()) == [1, 1, 2]
    size, _ = hybrid.place(np.array([90, 90, 20]), np.array([90, 90, 20]), 2, 1, 1.2)
    assert size.tolist() == [1, 1, 1]


def test_layouts_hold_every_token_once(rng):
    for layout in (
        layouts.contiguous(100, 8),
        layouts.zigzag(100, 8),
        layouts.zigzag_documents(DOCUMENTS, 4),
        layouts.split_evenly(layouts.zigzag(100, 4), 2),
        layouts.split_evenly(layouts.zigzag_documents(DOCUMENTS, 2), 4),
    ):
        held = layouts.positions(layout)
        assert sorted(held[held >= 0]) == list(range(layout.seq_len))
