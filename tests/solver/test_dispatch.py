"""Which rank gets which chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magi_jax import masks
from magi_jax.solver import dispatch
from magi_jax.solver.dispatch import DispatchProblem
from magi_jax.solver.dispatch.strategies import STRATEGIES

CHUNKED = ("contiguous", "zigzag", "lpt")


def problem_of(mask, chunk_size, cp_size):
    return DispatchProblem(mask.slices, dispatch.chunk_edges(mask.q_len, chunk_size), cp_size)


@given(
    length=st.integers(1, 200),
    chunk_size=st.integers(1, 30),
    cp_size=st.integers(1, 12),
    name=st.sampled_from(CHUNKED),
    causal=st.booleans(),
)
def test_counts_are_equal_up_to_one_chunk(length, chunk_size, cp_size, name, causal):
    mask = masks.causal(length) if causal else masks.empty(length)
    problem = problem_of(mask, chunk_size, cp_size)
    assignment = STRATEGIES[name](problem)
    chunks = np.bincount(assignment.owner, minlength=cp_size)
    assert chunks.max() - chunks.min() <= 1
    tokens = np.bincount(assignment.owner, weights=np.diff(problem.edges), minlength=cp_size)
    assert tokens.max() - tokens.min() <= chunk_size
    layout = dispatch.make_layout(assignment, cp_size)
    assert (np.diff(layout.owner) != 0).all(), "neighbours of one owner are merged"
    assert layout.seq_len == length
    for rank in range(cp_size):
        mine = np.flatnonzero(layout.owner == rank)
        size = np.diff(layout.edges)[mine]
        assert layout.local_start[mine].tolist() == (np.cumsum(size) - size).tolist()


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100])
def test_chunk_areas(chunk_size):
    mask = masks.varlen([40, 1, 0, 59], causal=True, window=(20, None))
    problem = problem_of(mask, chunk_size, 2)
    rows = mask.dense().sum(axis=1)
    expected = np.add.reduceat(rows, problem.edges[:-1])
    assert dispatch.chunk_areas(problem).tolist() == expected.tolist()


def test_known_assignments():
    problem = problem_of(masks.causal(80), 10, 2)
    assert dispatch.contiguous(problem).owner.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert dispatch.zigzag(problem).owner.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    # Heaviest first: chunk 7 to rank 0, 6 to 1, 5 to 1 (now heavier), and so on.
    assert dispatch.lpt(problem).owner.tolist() == [0, 1, 1, 0, 0, 1, 1, 0]


def test_zigzag_balances_a_causal_mask_exactly():
    problem = problem_of(masks.causal(320), 10, 4)
    area = dispatch.chunk_areas(problem)
    load = np.bincount(dispatch.zigzag(problem).owner, weights=area)
    assert len(set(load.tolist())) == 1


def test_lpt_fills_the_least_loaded_rank_with_room():
    """Two heavy documents and many light tokens: no rank gets both heavy chunks."""
    mask = masks.varlen([16, *[1] * 16, 16, *[1] * 16])
    problem = problem_of(mask, 8, 4)
    area = dispatch.chunk_areas(problem)
    load = np.bincount(dispatch.lpt(problem).owner, weights=area, minlength=4)
    assert load.max() == area.max() + area.min()
