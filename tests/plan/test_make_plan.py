"""A plan computes every cell of its mask once, where its query lives, with keys that are there."""

import jax
import numpy as np
import plan_simulation as simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_jax.masks import AttnMask
from magi_jax.plan import AttentionPlan, PlanConfig, make_plan

DISPATCHERS = ("contiguous", "zigzag", "lpt")


def check_plan(plan: AttentionPlan, mask: AttnMask, walk: bool = True) -> None:
    """All invariants of a plan, against the dense mask."""
    seq_len = plan.spec.seq_len
    for leaf in jax.tree.leaves(plan):
        assert leaf.dtype == np.int32
        assert leaf.shape[0] == plan.cp_size
    expected = np.zeros((seq_len, seq_len), np.int64)
    expected[: mask.q_len, : mask.k_len] = mask.dense()
    np.testing.assert_array_equal(simulate.computed_cells(plan, walk), expected)
    check_dispatch(plan)
    check_moves(plan)
    check_no_redundancy(plan, expected)


def check_dispatch(plan: AttentionPlan) -> None:
    """Positions permute the tokens, in global order per rank, and segments agree with them."""
    positions = np.asarray(plan.positions)
    assert sorted(positions[positions >= 0].tolist()) == list(range(plan.spec.seq_len))
    rebuilt = np.full_like(positions, -1)
    for rank, segments in enumerate(plan.dispatch.segments):
        for start, local_start, n_rows in segments:
            rebuilt[rank, local_start : local_start + n_rows] = np.arange(start, start + n_rows)
    np.testing.assert_array_equal(rebuilt, positions)
    counts = (positions >= 0).sum(axis=1)
    assert counts.max() - counts.min() <= plan.spec.chunk_size
    for row, count in zip(positions, counts, strict=True):
        assert (np.diff(row[:count]) > 0).all()
        assert (row[count:] == -1).all()


def check_moves(plan: AttentionPlan) -> None:
    """The transfer and the rolls bring each row where its position says."""
    positions = np.asarray(plan.positions)
    seq_len = plan.spec.seq_len
    per_rank = -(-seq_len // plan.cp_size)
    assert plan.dispatch.transfer.src_rows == per_rank
    contiguous = np.arange(plan.cp_size * per_rank).reshape(plan.cp_size, per_rank)
    np.testing.assert_array_equal(
        simulate.cast(plan.dispatch.transfer, np.where(contiguous < seq_len, contiguous, -1)),
        positions,
    )
    for shift, meta in zip(plan.spec.roll_shifts, plan.rolls, strict=True):
        wanted = positions - shift
        wanted = np.where((positions < 0) | (wanted < 0) | (wanted >= seq_len), -1, wanted)
        np.testing.assert_array_equal(simulate.cast(meta, positions), wanted)


def check_no_redundancy(plan: AttentionPlan, expected: np.ndarray) -> None:
    """Each rank receives exactly the distinct keys that its queries see and it does not own."""
    positions = np.asarray(plan.positions)
    received = [simulate.cast(meta, positions) for meta in plan.comm]
    for rank in range(plan.cp_size):
        own = positions[rank][positions[rank] >= 0]
        needed = np.setdiff1d(np.flatnonzero(expected[own].any(axis=0)), own)
        got = np.concatenate([rows[rank] for rows in received]) if received else own[:0]
        got = got[got >= 0]
        np.testing.assert_array_equal(np.sort(got), needed)
        sizes = [(rows[rank] >= 0).sum() for rows in received]
        assert not sizes or max(sizes) - min(sizes) <= 1


@st.composite
def square_masks(draw, max_len: int = 90):
    """Random disjoint slices: random boxes and bands, each cut free of those before it by `|`."""
    length = draw(st.integers(1, max_len))
    mask = AttnMask(np.zeros((0, 6), np.int64), length, length)
    for _ in range(draw(st.integers(0, 5))):
        q = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        k = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        d = sorted(draw(st.tuples(st.integers(-length, length), st.integers(-length, length))))
        band = np.array([[*q, *k, *d]], np.int64)
        mask = mask | AttnMask(band, length, length)
    return mask


@settings(max_examples=60, deadline=None)
@given(
    mask=square_masks(),
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    chunk_size=st.integers(1, 40),
    dispatch=st.sampled_from(DISPATCHERS),
    overlap=st.sampled_from(["auto", 1, 2, 3]),
    tile_size=st.sampled_from([4, 16, 128]),
    shifts=st.lists(st.integers(-100, 100), max_size=2, unique=True),
)
def test_random_masks(mask, cp_size, chunk_size, dispatch, overlap, tile_size, shifts):
    config = PlanConfig(
        chunk_size=chunk_size,
        dispatch=dispatch,
        overlap=overlap,
        roll_shifts=tuple(shifts),
        tile_size=tile_size,
    )
    check_plan(make_plan(mask, cp_size, config), mask)
