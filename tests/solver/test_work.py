"""What crosses ranks and what each computes: the compiled engine against NumPy, and travelling queries."""

import numpy as np
import pytest

from magi_jax import masks
from magi_jax.masks import AttnMask, bands
from magi_jax.solver import dispatch
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.dispatch import DispatchProblem
from magi_jax.solver.dispatch.balanced import balanced, placement_maker
from magi_jax.solver.dispatch.units import make_units
from magi_jax.solver.overlap import travelling
from magi_jax.solver.overlap.late import find_late, late_rows
from magi_jax.solver.overlap.travelling import Ranges, choose_ranges, split_slices
from magi_jax.solver.work import transfer
from magi_jax.solver.work.find_work import Keys, find_work
from magi_jax.testing.cases import mask_cases, random_mask

SQUARE = {name: mask for name, mask in mask_cases(384).items() if mask.q_len == mask.k_len}


def random_layout(rng, length, cp_size, chunk_size=13):
    edges = dispatch.chunk_edges(length, chunk_size)
    owner = rng.permutation(np.arange(len(edges) - 1) % cp_size)
    return dispatch.make_layout(dispatch.Assignment(edges, owner), cp_size)


def assert_same(compiled, twin):
    assert len(compiled) == len(twin)
    for a, b in zip(compiled, twin, strict=True):
        assert np.array_equal(a, b)


def ranges_of(*pairs) -> Ranges:
    return Ranges(*np.array(pairs, np.int64).reshape(-1, 2).T)


@pytest.mark.parametrize("name", sorted(SQUARE))
def test_engines_find_the_same(name):
    rng = np.random.default_rng(len(name))
    layout = random_layout(rng, 384, 5)
    home, away = split_slices(SQUARE[name].slices, ranges_of((100, 130), (300, 384)))
    keys = Keys(layout, 0)
    works = [find_work(home, away, layout, keys, engine) for engine in ("compiled", "numpy")]
    assert_same(works[0].cut, works[1].cut)
    assert_same(works[0].far, works[1].far)
    if len(away):
        assert_same(works[0].travel.moved, works[1].travel.moved)
        for part in ("away", "home"):
            assert_same(getattr(works[0].travel, part), getattr(works[1].travel, part))
    for count, turned in ((1, False), (2, False), (5, False), (2, True), (5, True)):
        compiled, twin = (work.staged(count, turned) for work in works)
        assert_same(compiled.remote, twin.remote)
        for a, b in zip(compiled.slices, twin.slices, strict=True):
            assert_same(a, b)
        for stage in range(count):
            pieces = transfer.stage_pieces(twin.remote, stage)
            tables = [transfer.transfer_tables(pieces, 5, e) for e in ("compiled", "numpy")]
            assert_same(*tables)
    for pieces in (transfer.dispatch_pieces(layout), transfer.roll_pieces(layout, -3)):
        assert_same(*(transfer.transfer_tables(pieces, 5, e) for e in ("compiled", "numpy")))


@pytest.mark.parametrize("engine", ["compiled", "numpy"])
def test_rectangles_are_joined_in_keys_and_in_queries(engine):
    """All own chunks of a full mask are one rectangle, and so is what each stage brings to all of them."""
    rng = np.random.default_rng(5)
    layout = random_layout(rng, 384, 5)
    mask = masks.full(384)
    work = find_work(mask.slices, mask.slices[:0], layout, Keys(layout, 0), engine)
    for count in (1, 3):
        for stage in work.staged(count).slices:
            assert stage.rank.tolist() == [0, 1, 2, 3, 4]
            assert (stage.slices[:, bands.Q_START] == 0).all()
            assert (stage.slices[:, bands.K_START] == 0).all()


def test_splitting_keeps_every_cell_once():
    rng = np.random.default_rng(0)
    for _ in range(30):
        mask = random_mask(rng, 80, 80, 6)
        edges = np.sort(rng.choice(81, 4, replace=False))
        home, away = split_slices(mask.slices, ranges_of(edges[:2], edges[2:]))
        inside = np.zeros(80, bool)
        inside[edges[0] : edges[1]] = inside[edges[2] : edges[3]] = True
        dense = mask.dense()
        assert np.array_equal(AttnMask(home, 80, 80).dense(), dense & ~inside[:, None])
        assert np.array_equal(AttnMask(away, 80, 80).dense(), dense & inside[:, None])


def global_block(length: int, rows: tuple[int, int]) -> AttnMask:
    documents = masks.uniform_block_causal([length // 8] * 8, length // 64)
    return documents | masks.global_rows(length, rows=rows)


@pytest.mark.parametrize("rows", [(0, 1024), (200_000, 201_024), (523_264, 524_288)])
def test_the_rows_of_a_global_block_travel(rows):
    mask = global_block(524_288, rows)
    edges = dispatch.chunk_edges(524_288, 1024)
    found = choose_ranges(mask.slices, edges, 64, 8, CostModel())
    assert [(int(a), int(b)) for a, b in zip(*found, strict=True)] == [rows]


@pytest.mark.parametrize("mask", [
    masks.causal(262_144), masks.full(262_144), masks.local(262_144, window=(1023, 0)),
    masks.varlen([65_536] * 4, causal=True), masks.varlen([16_384] * 16), masks.empty(262_144),
    masks.causal(300),
])  # fmt: skip
def test_no_row_of_an_ordinary_mask_travels(mask):
    edges = dispatch.chunk_edges(mask.q_len, 256)
    for cp_size in (1, 8, 32):
        assert not len(choose_ranges(mask.slices, edges, cp_size, min(8, cp_size), CostModel())[0])


@pytest.mark.parametrize("seed", range(12))
def test_what_is_ruled_out_at_once_would_not_travel(seed, monkeypatch):
    """Masks whose neediest rows are too many by the first look at them are not looked at twice."""
    rng = np.random.default_rng(seed)
    mask = masks.varlen(rng.integers(2_000, 60_000, 5), causal=bool(seed % 2))
    if seed % 3 == 0:
        mask = mask | masks.global_rows(mask.q_len, rows=(mask.q_len // 2, mask.q_len // 2 + 64))
    edges = dispatch.chunk_edges(mask.q_len, 1024)
    found = choose_ranges(mask.slices, edges, 16, 8, CostModel())
    monkeypatch.setattr(travelling, "_neediest_rows", lambda slices, need: 0)
    assert_same(found, choose_ranges(mask.slices, edges, 16, 8, CostModel()))


@pytest.mark.parametrize("engine", ["compiled", "numpy"])
def test_loads_count_travelling_rows_and_their_work(engine):
    length, cp_size = 512, 4
    mask = global_block(length, (448, 480))
    home, away = split_slices(mask.slices, ranges_of((448, 480)))
    edges = dispatch.chunk_edges(length, 32)
    problem = DispatchProblem(home, edges, cp_size, travelling=away, row_weight=3.0)
    units = make_units(problem)
    placement = placement_maker(engine)(units, cp_size, 2)
    owner = np.random.default_rng(1).integers(0, cp_size, len(units.area)).astype(np.int32)
    rows, area = placement.measure(owner)
    layout = dispatch.make_layout(
        dispatch.Assignment(units.edges, owner[: len(units.chunk)].astype(np.int64)), cp_size
    )
    work = find_work(home, away, layout, Keys(layout, 0))
    received, sent, expected = (np.zeros(cp_size, np.int64) for _ in range(3))
    for ranges, weight in ((work.far, 1), (work.travel.moved, 3)):
        np.add.at(received, ranges.dst, weight * (ranges.end - ranges.begin))
        np.add.at(sent, ranges.src, weight * (ranges.end - ranges.begin))
    for stage in (*work.staged(1).slices, work.travel.away):
        np.add.at(expected, stage.rank, bands.area(stage.slices))
    assert rows[:cp_size].tolist() == received.tolist()
    assert rows[cp_size : 2 * cp_size].tolist() == sent.tolist()
    assert area.tolist() == expected.tolist()


def test_travelling_rows_are_spread_over_ranks():
    length, cp_size = 65_536, 16
    rows = (length - 512, length)
    mask = global_block(length, rows)
    home, away = split_slices(mask.slices, ranges_of(rows))
    edges = dispatch.chunk_edges(length, 512)
    for effort in ("fast", "high"):
        problem = DispatchProblem(home, edges, cp_size, 8, effort, travelling=away, row_weight=12.0)
        layout = dispatch.make_layout(balanced(problem), cp_size)
        work = find_work(home, away, layout, Keys(layout, 0), "compiled")
        area = sum(
            np.bincount(stage.rank, bands.area(stage.slices), cp_size)
            for stage in (*work.staged(1).slices, work.travel.away)
        )
        assert area.max() <= 1.05 * area.mean()
        moved = work.travel.moved
        sent = np.bincount(moved.src, moved.end - moved.begin, cp_size)
        assert sent.max() <= 512 * 15 / 4
        assert np.bincount(moved.dst, moved.end - moved.begin, cp_size).max() <= 512


@pytest.mark.parametrize("seed", range(4))
def test_late_queries_and_all_others_share_the_work(seed):
    """Slices are cut where late rows begin and end, and no cell is lost or doubled."""
    rng = np.random.default_rng(seed)
    mask = masks.varlen(rng.integers(5, 90, 12), causal=bool(seed % 2))
    length, tile = mask.q_len, 4
    layout = random_layout(rng, length, 4)
    local_len = int(np.bincount(layout.owner, np.diff(layout.edges), 4).max())
    work = find_work(mask.slices, mask.slices[:0], layout, Keys(layout, local_len))
    rows = late_rows(work.staged(1), 4, tile, local_len)
    late = find_late(work, rows, local_len)
    home = late.home.slices[0]
    assert bands.area(home.slices).sum() + bands.area(late.slices.slices).sum() == mask.area
    is_late = np.zeros((4, local_len), bool)
    for rank, begin, end in zip(rows.rank, rows.begin, rows.end, strict=True):
        is_late[rank, begin:end] = True
    for part, wanted in ((home, False), (late.slices, True)):
        for rank, (begin, end, *_) in zip(part.rank, part.slices.tolist(), strict=True):
            assert (is_late[rank, begin:end] == wanted).all()
