"""A plan computes every cell of its mask once, where its query lives, with keys that are there."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check_plan

from magi_jax import masks
from magi_jax.masks import AttnMask
from magi_jax.plan import PlanConfig, make_plan, slice_table, solve
from magi_jax.solver.cost.model import CostModel
from magi_jax.testing.cases import mask_cases

DISPATCHERS = ("balanced", "contiguous", "zigzag", "lpt")


def varlen_causal(lengths) -> AttnMask:
    """Packed causal documents."""
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ranges = np.stack([edges[:-1], edges[1:]], axis=1)
    return AttnMask.from_slices(ranges, ranges, np.ones(len(ranges), np.int64), int(edges[-1]))


def empty_mask(length: int) -> AttnMask:
    """No query sees a key."""
    return AttnMask(np.zeros((0, 6), np.int64), length, length)


@st.composite
def square_masks(draw, max_len: int = 90):
    """Random disjoint slices: boxes and bands, joined by `|` so that none overlaps."""
    length = draw(st.integers(1, max_len))
    edge = st.integers(0, length)
    mask = empty_mask(length)
    for _ in range(draw(st.integers(0, 5))):
        q, k = sorted(draw(st.tuples(edge, edge))), sorted(draw(st.tuples(edge, edge)))
        d = sorted(draw(st.tuples(st.integers(-length, length), st.integers(-length, length))))
        mask = mask | AttnMask(np.array([[*q, *k, *d]], np.int64), length, length)
    return mask


@settings(max_examples=60, deadline=None)
@given(
    mask=square_masks(),
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    chunk_size=st.integers(1, 40),
    dispatch=st.sampled_from(DISPATCHERS),
    overlap=st.sampled_from(["auto", "late", 1, 2, 3, (1, 3), (2, 1)]),
    travelling=st.lists(st.integers(0, 89), max_size=4, unique=True).map(sorted),
    tile_size=st.sampled_from([4, 16, 128]),
    shifts=st.lists(st.integers(-100, 100), max_size=2, unique=True),
)
def test_random_masks(mask, cp_size, chunk_size, dispatch, overlap, travelling, tile_size, shifts):
    pairs = tuple(zip(travelling[::2], travelling[1::2], strict=False))
    config = PlanConfig(
        travelling="never" if overlap == "late" else pairs,
        chunk_size=chunk_size,
        dispatch=dispatch,
        overlap=overlap,
        roll_shifts=tuple(shifts),
        tile_size=tile_size,
    )
    check_plan(make_plan(mask, cp_size, config), mask)


SQUARE_CASES = {name: m for name, m in mask_cases(131).items() if m.q_len == m.k_len}


@pytest.mark.parametrize("name", SQUARE_CASES)
def test_named_masks(name):
    config = PlanConfig(chunk_size=11, tile_size=16)
    check_plan(make_plan(SQUARE_CASES[name], 4, config), SQUARE_CASES[name])


@pytest.mark.parametrize("dispatch", DISPATCHERS)
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8, 64])
def test_uneven_documents(cp_size, dispatch):
    rng = np.random.default_rng(cp_size)
    mask = varlen_causal(rng.integers(0, 120, 13))
    config = PlanConfig(chunk_size=7, dispatch=dispatch, overlap=2, tile_size=32)
    check_plan(make_plan(mask, cp_size, config), mask, walk=cp_size <= 8)


@pytest.mark.parametrize("cp_size", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 131])
def test_empty_mask(length, cp_size):
    mask = empty_mask(length)
    plan = make_plan(mask, cp_size)
    check_plan(plan, mask)
    report = plan.report()
    assert report.imbalance == 1.0
    assert not report.recv_rows.any()


@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_more_ranks_than_chunks(dispatch):
    mask = varlen_causal([37])
    plan = make_plan(mask, 8, PlanConfig(chunk_size=16, dispatch=dispatch, tile_size=16))
    check_plan(plan, mask)
    assert plan.spec.chunk_size == 5
    tokens = plan.report().tokens.tolist()
    if dispatch == "balanced":  # dealt to the row
        assert max(tokens) - min(tokens) <= 1
    else:
        assert tokens.count(5) == 7


@pytest.mark.parametrize("dispatch", DISPATCHERS)
@pytest.mark.parametrize("cp_size", [1, 2, 5, 8])
def test_travelling_queries(cp_size, dispatch):
    length = 131
    mask = masks.causal(length) | masks.global_rows(length, rows=(40, 44))
    config = PlanConfig(
        chunk_size=8, dispatch=dispatch, overlap=2, tile_size=16, travelling=((40, 44), (99, 101))
    )
    plan = make_plan(mask, cp_size, config)
    check_plan(plan, mask)
    if cp_size > 1:
        assert plan.report().travel_area.any()
        assert plan.report(mask=mask).gap >= 0
    twin = make_plan(mask, cp_size, dataclasses.replace(config, engine="numpy"))
    assert twin.fingerprint() == plan.fingerprint()


@pytest.mark.parametrize("times_us", [(1.0, 2.0), (2.0, 1.0)])
def test_queries_stay_at_home_where_the_layout_makes_that_faster(times_us, monkeypatch):
    documents = masks.uniform_block_causal([4096] * 16, 512)
    mask = documents | masks.global_rows(65_536, rows=(65_536 - 1024, 65_536))
    predicted = iter(times_us)  # when they travel, and when they stay
    monkeypatch.setattr(solve, "predict_us", lambda *_: next(predicted))
    plan = make_plan(mask, 16)
    assert (plan.travel is None) == (times_us[0] > times_us[1])
    assert next(predicted, None) is None


def test_a_global_block_travels_by_itself_and_balances():
    length = 524_288
    documents = masks.uniform_block_causal([length // 16] * 16, 2048)
    mask = documents | masks.global_rows(length, rows=(length - 2048, length))
    plans = [
        make_plan(mask, 64, PlanConfig(ranks_per_node=8, two_level=False, travelling=option))
        for option in ("auto", "never")
    ]
    travels, stays = (plan.report(ranks_per_node=8) for plan in plans)
    assert plans[1].travel is None
    assert travels.travel_traffic.sum(axis=0).max() <= 2048
    assert travels.imbalance <= 1.05
    assert travels.predicted_us < 0.6 * stays.predicted_us
    assert travels.recv_rows.max() < 0.3 * stays.recv_rows.max()


def test_one_token():
    mask = varlen_causal([1])
    check_plan(make_plan(mask, 4), mask)


def test_one_giant_document_is_balanced():
    mask = varlen_causal([640])
    for dispatch in ("zigzag", "lpt"):
        plan = make_plan(mask, 4, PlanConfig(chunk_size=16, dispatch=dispatch))
        check_plan(plan, mask, walk=False)
        assert plan.report().imbalance < 1.03


def test_thousands_of_one_token_documents():
    """Every token sees itself: nothing crosses ranks, and slices are not cut."""
    length = 4096
    mask = varlen_causal(np.ones(length, np.int64))
    plan = make_plan(mask, 64)
    report = plan.report()
    assert report.area.sum() == length
    assert report.imbalance == 1.0
    assert not report.recv_rows.any()


def test_window_on_contiguous_shards_brings_one_window():
    length, window = 1024, 16
    band = np.array([[0, length, 0, length, 1 - window, 0]], np.int64)
    config = PlanConfig(dispatch="contiguous", chunk_size=32)
    plan = make_plan(AttnMask(band, length, length), 8, config)
    report = plan.report()
    assert report.recv_rows.tolist() == [0] + [window - 1] * 7
    assert report.send_rows.tolist() == [window - 1] * 7 + [0]


def test_mask_shorter_than_the_sequence():
    config = PlanConfig(chunk_size=8, tile_size=16, overlap=1)
    mask = varlen_causal([50, 20])
    longer = make_plan(mask, 4, dataclasses.replace(config, seq_len=131))
    assert longer.spec.seq_len == 131
    check_plan(longer, mask)
    spec = longer.spec.union(make_plan(varlen_causal([60, 40, 31]), 4, config).spec)
    padded = make_plan(mask, 4, PlanConfig(tile_size=16), spec=spec)
    assert padded.spec == spec
    check_plan(padded, mask)


def test_planning_is_deterministic():
    mask = varlen_causal(np.random.default_rng(0).integers(1, 300, 40))
    assert make_plan(mask, 8).fingerprint() == make_plan(mask, 8).fingerprint()


@pytest.mark.parametrize(
    ("seq_len", "cp_size", "chunk_size"),
    [(65536, 8, 1024), (8192, 8, 128), (512, 8, 64), (100, 8, 13), (3, 8, 1), (524288, 64, 1024)],
)
def test_automatic_chunk_size(seq_len, cp_size, chunk_size):
    assert make_plan(empty_mask(seq_len), cp_size).spec.chunk_size == chunk_size


def test_auto_takes_the_number_of_stages_that_is_predicted_fastest():
    mask = varlen_causal([30000, 2768])
    chosen = set()
    for gbps in (2.0, 20.0, 2000.0):
        # Merging costs nothing, so that late queries are not looked at.
        model = CostModel(link_gbps=gbps, memory_gbps=1e6, latency_us=1.0, launch_us=0.0)
        config = PlanConfig(dispatch="contiguous", cost_model=model)
        auto = make_plan(mask, 4, config)
        chosen.add(auto.spec.num_remote_stages)
        fixed = [
            make_plan(mask, 4, dataclasses.replace(config, overlap=n)).report(model)
            for n in range(1, 5)
        ]
        found = auto.report(model)
        for direction in ("forward", "backward"):
            least_us = min(getattr(report, direction).predicted_us for report in fixed)
            assert getattr(found, direction).predicted_us <= 1.000001 * least_us
        assert 0 < auto.report(model).efficiency <= 1
    assert len(chosen) > 1
    assert make_plan(mask, 1).spec.num_remote_stages == 0


def test_all_queries_are_late_where_merging_a_stage_costs_more_than_waiting():
    """One causal document over two or eight ranks: keys come in less time than partial results take."""
    for cp_size, late in ((2, True), (8, False)):
        plan = make_plan(varlen_causal([32768 * cp_size]), cp_size)
        assert (plan.late is not None) == late
        fixed = make_plan(varlen_causal([32768 * cp_size]), cp_size, PlanConfig(overlap=1))
        assert plan.report().predicted_us <= 1.02 * fixed.report().predicted_us


def test_refusals():
    square = varlen_causal([64])
    with pytest.raises(ValueError, match="q_len=3 and k_len=5"):
        make_plan(AttnMask(np.zeros((0, 6), np.int64), 3, 5), 2)
    with pytest.raises(ValueError, match="cp_size must be at least 1, got 0"):
        make_plan(square, 0)
    with pytest.raises(ValueError, match="mask has 64 tokens, the sequence only 32"):
        make_plan(square, 2, PlanConfig(seq_len=32))
    with pytest.raises(ValueError, match="at least one token"):
        make_plan(empty_mask(0), 2)
    with pytest.raises(ValueError, match="got 'fair'"):
        PlanConfig(dispatch="fair")
    for travelling in ("always", ((3, 3),), ((4, 8), (6, 9)), ((5, 2),), 5, (5,)):
        with pytest.raises(ValueError, match="travelling must"):
            PlanConfig(travelling=travelling)
    for overlap in (0, -1, "two", 1.5, (1,), (1, 0), (1, ()), (1, (False,)), (1, (True, 2))):
        with pytest.raises(ValueError, match="overlap must be"):
            PlanConfig(overlap=overlap)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        PlanConfig(chunk_size=0)
    with pytest.raises(
        ValueError, match=r"roll_shifts must list integers, as \(-1,\) does, got -1"
    ):
        PlanConfig(roll_shifts=-1)
    with pytest.raises(ValueError, match="cost_model must be a CostModel, got 'h100'"):
        PlanConfig(cost_model="h100")
    with pytest.raises(ValueError, match="names a shift twice"):
        PlanConfig(roll_shifts=(-1, -1))


@pytest.mark.parametrize("other", [np.ones((4, 4), bool), "causal", None])
def test_what_is_no_mask_is_refused_by_name(other):
    plan = make_plan(varlen_causal([64]), 2)
    for make in (
        lambda: make_plan(other, 2),
        lambda: plan.with_mask(other),
        lambda: slice_table(other),
    ):
        with pytest.raises(
            TypeError, match=f"must be an AttnMask, got {type(other).__name__}; mag"
        ):
            make()


def test_other_kinds_of_config_and_spec_are_refused_by_name():
    plan = make_plan(varlen_causal([64]), 2)
    with pytest.raises(TypeError, match="config must be a PlanConfig or None, got dict"):
        make_plan(varlen_causal([64]), 2, {"chunk_size": 8})
    with pytest.raises(TypeError, match="spec must be a PlanSpec or None, got AttentionPlan"):
        make_plan(varlen_causal([64]), 2, spec=plan)


def test_reports_have_bounds_and_a_gap_when_given_the_mask():
    mask = varlen_causal([700, 324])
    plan = make_plan(mask, 4, PlanConfig(chunk_size=16))
    assert plan.report().gap is None
    report = plan.report(mask=mask)
    worst = max(report.recv_rows.max(), report.send_rows.max())
    assert 0 < report.bounds.rank_rows <= worst
    assert report.bounds.imbalance <= report.imbalance
    assert report.gap == worst / report.bounds.rank_rows - 1
    assert "lower bounds" in repr(report)
    with pytest.raises(ValueError, match=r"another one: it shows \d+ pairs, the plan computes \d+"):
        plan.report(mask=masks.full(mask.q_len - 1))
    full = AttnMask.from_slices([(0, 1024)], [(0, 1024)], 0, 1024)
    assert make_plan(full, 4).report(mask=full).gap == 0.0
