"""Documents that stay whole, on ranks and in nodes: what is cut, how even tokens and areas are."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_jax import masks
from magi_jax.masks import bands
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.solver import dispatch
from magi_jax.solver.dispatch import DispatchProblem
from magi_jax.solver.dispatch.balanced import balanced
from magi_jax.solver.dispatch.documents import document_edges
from magi_jax.solver.dispatch.whole import WholeDocuments

LIMIT = 1.014
KINDS = {"full": {}, "causal": {"causal": True}, "window": {"window": (20, 5)}}


def problem_of(mask, cp_size, **options):
    edges = dispatch.chunk_edges(mask.q_len, 16)
    return DispatchProblem(mask.slices, edges, cp_size, **options)


def whole_of(mask, cp_size, **options):
    return WholeDocuments(problem_of(mask, cp_size, **options), LIMIT)


def owners(assignment):
    return np.repeat(assignment.owner, np.diff(assignment.edges))


def areas_of(assignment, mask, bins, of_bin=1):
    per_row = np.zeros(mask.q_len)
    for row in mask.slices:
        begin, end = row[bands.Q_START], row[bands.Q_END]
        query = np.arange(begin, end)
        low = np.maximum(row[bands.K_START], query + row[bands.D_MIN])
        high = np.minimum(row[bands.K_END], query + row[bands.D_MAX] + 1)
        per_row[begin:end] += np.maximum(high - low, 0)
    return np.bincount(owners(assignment) // of_bin, per_row, bins)


def number_cut(assignment, mask, of_bin=1):
    owner = owners(assignment) // of_bin
    edges = document_edges(mask.slices, mask.q_len)
    return sum(len(set(owner[a:b])) > 1 for a, b in itertools.pairwise(edges))


def many_lengths(rng, number, most, total):
    """Random lengths that add up to ``total``."""
    lengths = rng.integers(1, most, number)
    while lengths.sum() != total:
        change = rng.integers(number)
        lengths[change] = np.clip(lengths[change] + np.sign(total - lengths.sum()), 1, most)
    return lengths


@given(
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=60),
    cp_size=st.integers(1, 8),
    per_node=st.integers(1, 4),
    kind=st.sampled_from(sorted(KINDS)),
)
@settings(max_examples=60, deadline=None)
def test_every_row_is_placed_once_and_tokens_are_equal(lengths, cp_size, per_node, kind):
    mask = masks.varlen(lengths, **KINDS[kind])
    cp_size *= per_node
    whole = whole_of(mask, cp_size, ranks_per_node=per_node)
    for placed in (whole.on_ranks(), whole.in_nodes(per_node)):
        if placed is None:
            continue
        assert placed.edges[[0, -1]].tolist() == [0, mask.q_len]
        assert (np.diff(placed.edges) > 0).all()
        tokens = np.bincount(placed.owner, np.diff(placed.edges), cp_size)
        assert len(tokens) == cp_size
        assert tokens.max() - tokens.min() <= 1


@given(
    seed=st.integers(0, 1 << 32),
    cp_size=st.sampled_from([2, 3, 8, 9, 24]),
    per_rank=st.integers(3, 50),
    most=st.sampled_from([3, 60, 700]),
)
@settings(max_examples=40, deadline=None)
def test_engines_pack_alike(seed, cp_size, per_rank, most):
    lengths = np.random.default_rng(seed).integers(1, most, per_rank * cp_size)
    mask = masks.varlen(lengths, causal=True)
    for limit in (LIMIT, 1.5):
        compiled, twin = (
            WholeDocuments(problem_of(mask, cp_size, engine=engine), limit)
            for engine in ("compiled", "numpy")
        )
        for found, wanted in (
            (compiled.on_ranks(), twin.on_ranks()),
            (compiled.in_nodes(1), twin.in_nodes(1)),
        ):
            assert (found is None) == (wanted is None)
            if found is not None:
                np.testing.assert_array_equal(found.edges, wanted.edges)
                np.testing.assert_array_equal(found.owner, wanted.owner)


@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("cp_size", [2, 8, 16])
def test_many_short_documents_are_not_cut(cp_size, kind):
    rng = np.random.default_rng(3)
    mask = masks.varlen(many_lengths(rng, 30 * cp_size, 80, 1200 * cp_size), **KINDS[kind])
    placed = whole_of(mask, cp_size).on_ranks()
    area = areas_of(placed, mask, cp_size)
    assert number_cut(placed, mask) == 0
    assert area.max() <= LIMIT * area.mean()
    chosen = balanced(problem_of(mask, cp_size))
    assert number_cut(chosen, mask) == 0


@pytest.mark.parametrize("seed", range(3))
def test_documents_stay_in_their_node(seed):
    """Some are more than a rank's work, none is that of a node; what is cut evens tokens out."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([rng.integers(300, 400, 12), many_lengths(rng, 200, 60, 4096)])
    lengths = rng.permutation(np.append(lengths, -lengths.sum() % 16))
    mask = masks.varlen(lengths[lengths > 0], causal=True)
    placed = whole_of(mask, 16, ranks_per_node=4).in_nodes(4)
    cut = number_cut(placed, mask, of_bin=4)
    assert cut <= 3
    area = areas_of(placed, mask, 16)
    assert area.max() <= 1.05 * area.mean()
    assert number_cut(placed, mask) > cut


@pytest.mark.parametrize(
    "mask",
    [masks.causal(640), masks.varlen([320, 320], causal=True), masks.varlen([500, *[20] * 7])],
)
def test_few_or_large_documents_are_left_to_others(mask):
    whole = whole_of(mask, 4, ranks_per_node=2)
    assert whole.on_ranks() is None
    assert whole.in_nodes(2) is None


def test_a_plan_of_whole_documents_moves_nothing():
    rng = np.random.default_rng(5)
    mask = masks.varlen(many_lengths(rng, 400, 60, 8192), causal=True)
    plan = make_plan(mask, 16, PlanConfig(ranks_per_node=4))
    report = plan.report(mask=mask)
    assert plan.comm == ()
    assert report.imbalance <= 1.014


@pytest.mark.parametrize("effort", ["fast", "high"])
@pytest.mark.parametrize("cp_size", [2, 8])
def test_nothing_is_searched_for_where_nothing_moves(cp_size, effort, monkeypatch):
    def search(*arguments):
        raise AssertionError("chunks are searched")

    monkeypatch.setattr("magi_jax.solver.dispatch.balanced._search", search)
    rng = np.random.default_rng(2)
    mask = masks.varlen(many_lengths(rng, 40 * cp_size, 60, 1000 * cp_size), causal=True)
    assert number_cut(balanced(problem_of(mask, cp_size, effort=effort)), mask) == 0
