"""Documents by the million: neighbours in groups, diagonals in one slice, and plans of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_jax import masks
from magi_jax.masks import bands
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.solver import dispatch
from magi_jax.solver.dispatch import DispatchProblem, runs
from magi_jax.solver.dispatch.documents import document_edges, document_groups
from magi_jax.solver.work.join import join_diagonals

KINDS = {"full": {}, "causal": {"causal": True}, "window": {"window": (2, 1)}}
LENGTHS = st.lists(st.one_of(st.integers(1, 4), st.integers(30, 90)), min_size=1, max_size=120)


@given(lengths=LENGTHS, most=st.integers(2, 40), kind=st.sampled_from(sorted(KINDS)))
@settings(max_examples=40, deadline=None)
def test_groups_are_whole_documents_and_keep_their_area(lengths, most, kind):
    mask = masks.varlen(lengths, **KINDS[kind])
    slices = np.random.default_rng(len(lengths)).permutation(mask.slices)
    groups = document_groups(slices, mask.q_len, most)
    edges = document_edges(slices, mask.q_len)
    assert np.isin(groups.edges, edges).all()
    assert groups.edges[[0, -1]].tolist() == [0, mask.q_len]
    assert 1 <= len(groups.edges) - 1 <= most
    before = np.append(0, np.cumsum(mask.dense().sum(axis=1)))
    group = np.searchsorted(groups.edges, groups.slices[:, bands.Q_START], side="right") - 1
    area = np.bincount(group, bands.area(groups.slices), len(groups.edges) - 1)
    assert area.tolist() == np.diff(before[groups.edges]).tolist()
    assert (groups.slices[:, bands.Q_END] <= groups.edges[group + 1]).all()
    twin = document_groups(slices, mask.q_len, most, "compiled")
    assert groups.edges.tolist() == twin.edges.tolist()
    assert groups.slices.tolist() == twin.slices.tolist()


def test_long_documents_keep_their_slices():
    lengths = [*[2] * 50, 300, *[1] * 40, 200, 3]
    mask = masks.varlen(lengths, causal=True)
    groups = document_groups(mask.slices, mask.q_len, 8)
    assert groups.edges.tolist() == [0, 100, 400, 440, 640, 643]
    assert mask.slices[50].tolist() in groups.slices.tolist()
    assert mask.slices[91].tolist() in groups.slices.tolist()


def test_rows_that_see_nothing_are_documents():
    mask = masks.varlen([2] * 20, causal=True).shift(30, 30, 100, 100)
    for engine in ("numpy", "compiled"):
        groups = document_groups(mask.slices, 100, 10, engine)
        assert groups.edges.tolist() == [0, 30, 40, 60, 70, 100]
        assert bands.area(groups.slices).sum() == mask.area
        nothing = document_groups(mask.slices[:0], 100, 10, engine)
        assert (nothing.edges.tolist(), len(nothing.slices)) == ([0, 100], 0)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("seed", range(3))
def test_groups_are_dealt_as_evenly_as_documents(kind, seed, monkeypatch):
    monkeypatch.setattr(runs, "MOST_DOCUMENTS", 64)
    monkeypatch.setattr(runs, "MOST_GROUPS", 64)
    rng = np.random.default_rng(seed)
    mask = masks.varlen(np.append(rng.integers(1, 5, 600), rng.integers(90, 120, 9)), **KINDS[kind])
    problem = DispatchProblem(mask.slices, dispatch.chunk_edges(mask.q_len, 16), 8)
    rows = mask.dense().sum(axis=1)
    placed = list(runs.runs(problem))
    twins = list(runs.runs(problem._replace(engine="numpy")))
    assert len(placed) == len(runs.ALL_ORDERS)
    for assignment, twin in zip(placed, twins, strict=True):
        assert assignment.edges.tolist() == twin.edges.tolist()
        assert assignment.owner.tolist() == twin.owner.tolist()
        owner = np.repeat(assignment.owner, np.diff(assignment.edges))
        tokens = np.bincount(owner, minlength=8)
        assert tokens.max() - tokens.min() <= 1
        area = np.bincount(owner, rows, 8)
        # To a row, and where a share ends inside of a group of short documents, taken for even rows.
        assert area.max() <= area.mean() + 4 * rows.max() + 4 * 70


@given(
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=60),
    kind=st.sampled_from(sorted(KINDS)),
    shuffled=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_joined_diagonals_show_the_same_cells(lengths, kind, shuffled):
    mask = masks.varlen(lengths, **KINDS[kind])
    slices = mask.slices
    if shuffled:
        slices = np.random.default_rng(len(lengths)).permutation(slices)
    joined = join_diagonals(slices)
    assert joined.tolist() == join_diagonals(slices, "compiled").tolist()
    assert (masks.AttnMask(joined, mask.q_len, mask.k_len).dense() == mask.dense()).all()
    if not shuffled:
        ones = np.array(lengths) == 1
        assert len(joined) == len(lengths) - (ones[1:] & ones[:-1]).sum()


@pytest.mark.parametrize("join", [join_diagonals, lambda s: join_diagonals(s, "compiled")])
def test_what_cannot_be_joined_stays_as_it_is(join):
    for mask in (masks.causal(64), masks.varlen([2, 3, 1, 4]), masks.empty(9)):
        assert join(mask.slices) is mask.slices


def test_neighbours_off_the_diagonal_are_not_joined():
    rows = [[0, 1, 0, 1, 0, 0], [1, 2, 2, 3, 1, 1], [3, 4, 4, 5, 1, 1], [4, 6, 5, 7, 1, 1]]
    expected = [rows[0], rows[1], [3, 6, 4, 7, 1, 1]]
    for engine in ("numpy", "compiled"):
        assert join_diagonals(np.array(rows), engine).tolist() == expected


@pytest.mark.parametrize("most", [1, 3])
def test_plans_of_many_short_documents_are_even(most):
    lengths = np.random.default_rng(most).integers(1, most + 1, 40_000)
    mask = masks.varlen(lengths, causal=True)
    plan = make_plan(mask, 64, PlanConfig(ranks_per_node=8))
    report = plan.report()
    assert report.imbalance <= 1.02
    assert report.redundancy == 1.0
    # A rank begins in two documents at most and ends in two.
    assert report.recv_rows.max() <= 4 * (most - 1)
    assert bool(report.recv_rows.max()) == (most > 1)
