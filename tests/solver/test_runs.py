"""Dealing documents out row by row: what is dealt, how evenly, and its two engines against each other."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_jax import make_plan, masks
from magi_jax.solver import dispatch
from magi_jax.solver.dispatch import DispatchProblem
from magi_jax.solver.dispatch import runs as dealing
from magi_jax.solver.dispatch.balanced import balanced
from magi_jax.solver.dispatch.documents import document_edges
from magi_jax.solver.dispatch.runs import ALL_ORDERS
from magi_jax.solver.overlap.travelling import Ranges, split_slices
from magi_jax.testing.cases import mask_cases

SQUARE = {name: mask for name, mask in mask_cases(384).items() if mask.q_len == mask.k_len}
KINDS = {"full": {}, "causal": {"causal": True}, "window": {"window": (20, 5)}}


def runs(problem):
    return list(dealing.runs(problem))


def problem_of(mask, cp_size, **options):
    edges = dispatch.chunk_edges(mask.q_len, 16)
    return DispatchProblem(mask.slices, edges, cp_size, **options)


def areas_of(assignment, mask, cp_size):
    owner = np.repeat(assignment.owner, np.diff(assignment.edges))
    return np.bincount(owner, weights=mask.dense().sum(axis=1), minlength=cp_size)


@pytest.mark.parametrize("name", sorted(SQUARE))
def test_documents_share_no_pair(name):
    mask = SQUARE[name]
    edges = document_edges(mask.slices, mask.q_len)
    assert edges[[0, -1]].tolist() == [0, mask.q_len]
    assert (np.diff(edges) > 0).all()
    document = np.searchsorted(edges, np.arange(mask.q_len), side="right")
    queries, keys = np.nonzero(mask.dense())
    assert (document[queries] == document[keys]).all()


def test_documents_are_found_one_by_one():
    mask = masks.varlen([30, 1, 50, 19], causal=True).shift(10, 10, 120, 120)
    edges = document_edges(mask.slices, 120)
    assert edges.tolist() == [0, 10, 40, 41, 91, 110, 120]
    assert document_edges(masks.causal(64).slices, 64).tolist() == [0, 64]
    assert document_edges(masks.empty(64).slices, 64).tolist() == [0, 64]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=30),
    cp_size=st.integers(1, 8),
    kind=st.sampled_from(sorted(KINDS)),
)
@settings(max_examples=25, deadline=None)
def test_every_row_is_dealt_once_and_tokens_are_equal(lengths, cp_size, kind):
    mask = masks.varlen(lengths, **KINDS[kind])
    placed = runs(problem_of(mask, cp_size))
    assert len(placed) == (len(ALL_ORDERS) if mask.q_len >= cp_size else 0)
    twins = runs(problem_of(mask, cp_size, engine="numpy"))
    for assignment, twin in zip(placed, twins, strict=True):
        assert assignment.edges[[0, -1]].tolist() == [0, mask.q_len]
        assert (np.diff(assignment.edges) > 0).all()
        tokens = np.bincount(assignment.owner, np.diff(assignment.edges), cp_size)
        assert len(tokens) == cp_size
        assert tokens.max() - tokens.min() <= 1
        assert assignment.edges.tolist() == twin.edges.tolist()
        assert assignment.owner.tolist() == twin.owner.tolist()


@pytest.mark.parametrize("name", sorted(SQUARE))
def test_engines_deal_alike(name):
    problem = problem_of(SQUARE[name], 6)
    for assignment, twin in zip(runs(problem), runs(problem._replace(engine="numpy")), strict=True):
        assert assignment.edges.tolist() == twin.edges.tolist()
        assert assignment.owner.tolist() == twin.owner.tolist()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_areas_are_equal_up_to_a_row(kind):
    """Random documents, none with more work than a rank: balance to the row, which no chunks allow."""
    rng = np.random.default_rng(7)
    mask = masks.varlen(rng.integers(5, 120, 60), **KINDS[kind])
    mean, most = mask.dense().sum() / 8, mask.dense().sum(axis=1).max()
    for assignment in runs(problem_of(mask, 8)):
        area = areas_of(assignment, mask, 8)
        assert area.max() <= mean + 4 * most


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_few_documents_are_cut(kind):
    rng = np.random.default_rng(3)
    mask = masks.varlen(rng.integers(5, 60, 200), **KINDS[kind])
    edges = document_edges(mask.slices, mask.q_len)
    for assignment in runs(problem_of(mask, 8)):
        owner = np.repeat(assignment.owner, np.diff(assignment.edges))
        cut = sum(len(set(owner[a:b])) > 1 for a, b in itertools.pairwise(edges))
        assert cut <= 2 * 7  # where the share of a rank ends in either pile


def test_a_dense_document_takes_as_few_rows_of_each_rank_as_balance_asks_for():
    """A quarter of the tokens is 56 of 64 ranks' work, and no number of whole chunks is just as much."""
    mask = masks.varlen([2048, *[96] * 64])
    problem = problem_of(mask, 16, ranks_per_node=4)
    area = areas_of(balanced(problem), mask, 16)
    assert area.max() <= 1.001 * area.mean()


def uneven_documents(rng, count):
    """Questions with answers that see them, and documents whose prefix is seen as a whole: what a row sees
    does not tell what the rows after it see.
    """
    lengths = rng.integers(40, 200, count)
    parts, at = [], 0
    for i, length in enumerate(lengths.tolist()):
        first = int(length * rng.uniform(0.1, 0.6))
        ranges = [(at, at + first), (at + first, at + length)]
        if i % 2:
            parts += [
                (ranges[0], ranges[0], 1),
                (ranges[1], ranges[0], 0),
                (ranges[1], ranges[1], 1),
            ]
        else:
            parts += [(ranges[0], ranges[0], 0), (ranges[1], (at, at + length), 1)]
        at += length
    queries, keys, types = zip(*parts, strict=True)
    return masks.AttnMask.from_slices(list(queries), list(keys), list(types), at)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cp_size", [8, 16])
def test_documents_that_do_not_mix_are_balanced_by_others(seed, cp_size):
    mask = uneven_documents(np.random.default_rng(seed), 4 * cp_size)
    problem = problem_of(mask, cp_size)
    most = mask.dense().sum(axis=1).max()
    placed, twins = runs(problem), runs(problem._replace(engine="numpy"))
    for assignment, twin in zip(placed, twins, strict=True):
        assert assignment.edges.tolist() == twin.edges.tolist()
        assert assignment.owner.tolist() == twin.owner.tolist()
        area = areas_of(assignment, mask, cp_size)
        assert area.max() <= 1.01 * area.mean() + 4 * most


@pytest.mark.parametrize(
    "mask", [masks.causal(1003), masks.full(1003), masks.prefix_lm([1003], [200])]
)
@pytest.mark.parametrize("effort", ["fast", "high"])
def test_one_document_is_dealt_to_the_row(mask, effort):
    """Whole chunks of a length that they do not divide would be 4 % apart."""
    problem = problem_of(mask, 8, effort=effort)
    assert len(runs(problem)) == 1
    area = areas_of(balanced(problem), mask, 8)
    assert area.max() <= area.mean() + 4 * 1003
    twin = balanced(problem_of(mask, 8, engine="numpy"))
    assert np.array_equal(balanced(problem_of(mask, 8)).owner, twin.owner)


def test_one_document_of_like_parts_is_dealt_in_neighbouring_rows():
    window = masks.local(1003, window=(100, 0))
    (placed,) = runs(problem_of(window, 4))
    assert placed.owner.tolist() == [0, 1, 2, 3]
    assert placed.edges.tolist() == [1003 * i // 4 for i in range(5)]
    with_dense_rows = window | masks.global_rows(1003, rows=(1000, 1003))
    for placed in runs(problem_of(with_dense_rows, 4)):
        area = areas_of(placed, with_dense_rows, 4)
        assert area.max() <= area.mean() + 1003


@pytest.mark.parametrize("window", [(1023, 0), (0, 1023), (700, 0)])
def test_the_second_of_two_ranks_takes_some_of_the_rows_whose_window_is_not_full(window):
    mask = masks.local(16_384, window=window)
    problem = problem_of(mask, 2)
    neighbours, apart = runs(problem)
    assert apart.owner.tolist() == [1, 0, 1]
    assert (np.diff(apart.edges) % 128 == 0).all()
    miss, miss_apart = (
        np.ptp(areas_of(placed, mask, 2)) / mask.area for placed in (neighbours, apart)
    )
    assert miss_apart < miss / 4
    assert balanced(problem).owner.tolist() == [1, 0, 1]


@pytest.mark.parametrize("window", [(50, 0), (400, 400), (16_383, 16_383)])
def test_where_two_ranks_are_even_neighbours_stay_together(window):
    (placed,) = runs(problem_of(masks.local(16_384, window=window), 2))
    assert placed.owner.tolist() == [0, 1]


@pytest.mark.parametrize("rows", [(0, 13), (500, 516), (300, 420)])
@pytest.mark.parametrize("cp_size", [4, 7])
def test_each_rank_holds_as_many_travelling_rows(rows, cp_size):
    """And the area that these rows are to others, as keys, counts as their owner's."""
    packed = masks.varlen([60, 150, 41, 90, 120, 55], causal=True)
    mask = packed | masks.global_rows(packed.q_len, rows=rows)
    home, away = split_slices(mask.slices, Ranges(*np.array(rows)[:, None]))
    problem = problem_of(mask, cp_size)._replace(slices=home, travelling=away)
    placed, twins = runs(problem), runs(problem._replace(engine="numpy"))
    assert len(placed) == len(ALL_ORDERS)
    work = masks.AttnMask(home, mask.q_len, mask.q_len).dense().sum(axis=1)
    work += masks.AttnMask(away, mask.q_len, mask.q_len).dense().sum(axis=0)
    for assignment, twin in zip(placed, twins, strict=True):
        assert assignment.edges.tolist() == twin.edges.tolist()
        assert assignment.owner.tolist() == twin.owner.tolist()
        owner = np.repeat(assignment.owner, np.diff(assignment.edges))
        held = np.bincount(owner[rows[0] : rows[1]], minlength=cp_size)
        assert held.max() - held.min() <= 1
        tokens = np.bincount(owner, minlength=cp_size)
        assert tokens.max() - tokens.min() <= 1
        area = np.bincount(owner, work, cp_size)
        assert area.max() <= area.mean() + 4 * work.max()


@pytest.mark.parametrize("cp_size", [8, 32])
def test_light_first_frames_of_a_video_are_dealt_beside_the_others(cp_size):
    """Trading chunks left 32 ranks with up to 56,208 rows, and 8 ranks 1.4 % from even."""
    frame, window = 1560, 8
    mask = masks.uniform_block_causal([63 * frame], frame, window=(window, 0), global_prefix=1)
    report = make_plan(mask, cp_size).report()
    assert report.imbalance <= 1.002
    # A run of later frames with their window and the first frame, and a run of first frames with theirs.
    assert max(report.recv_rows.max(), report.send_rows.max()) <= (2 * (window + 1) + 1) * frame


def test_a_document_that_is_dense_and_light_by_turns_is_not_dealt():
    turns = masks.varlen([8, 24] * 4, causal=True) | masks.global_columns(128, columns=(0, 1))
    assert runs(problem_of(turns, 4)) == []


def test_parts_of_a_very_long_document_are_found():
    """Its area times its length is past 64 bits."""
    length, frame = 1 << 24, 1 << 18
    mask = masks.uniform_block_causal([length], frame, window=(32, 0))
    edges = dealing._density_edges(mask.slices, length)
    # A frame sees 33 at most and 25 in the mean.
    assert edges.tolist() == [0, 24 * frame, length]
