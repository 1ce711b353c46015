"""The simulation counts every visible pair once, and its model of time keeps to simple bounds."""

import numpy as np
import pytest
from scaling import bench as scaling_bench
from scaling import commands, fit, links, measure, orders
from scaling import work as scaling_work
from scaling.bench import Bench
from scaling.machine import Machine, Times
from scaling.model import step_us
from scaling.problems import Problem, document_lengths
from scaling.work import OURS, Piece, Work, make_work

from magi_jax import masks
from magi_jax.ops import get_implementation

RANKS = 8
LENGTHS = np.array([700, 90, 400, 1, 333, 524])


@pytest.fixture
def problem():
    return Problem(masks.varlen(LENGTHS, causal=True), LENGTHS)


def areas(calls: np.ndarray, pieces: dict[str, Piece]) -> np.ndarray:
    return np.array([[pieces[key].area if key else 0 for key in row] for row in calls])


@pytest.mark.parametrize("ranks", [8, 16])
def test_every_pair_is_in_one_call(problem, ranks):
    for name in scaling_work.strategy_names(problem, ranks):
        pieces: dict[str, Piece] = {}
        work = make_work(name, problem, ranks, pieces)
        for calls in (work.calls, work.backward_calls):
            assert areas(calls, pieces).sum() == problem.mask.area, name


def test_travelling_queries_are_counted():
    seq_len = 4096
    mask = masks.varlen([512] * 7 + [384], causal=True).shift(0, 0, seq_len, seq_len)
    mask = mask | masks.global_rows(seq_len, rows=(seq_len - 128, seq_len))
    pieces: dict[str, Piece] = {}
    work = make_work(OURS, Problem(mask, document_lengths(mask)), RANKS, pieces)
    total = areas(work.calls, pieces).sum()
    if work.travel_calls is not None:
        total += areas(work.travel_calls[:, None], pieces).sum()
    assert total == mask.area


def test_documents_are_found_again():
    found = document_lengths(masks.varlen(LENGTHS))
    np.testing.assert_array_equal(found, LENGTHS)
    assert len(document_lengths(masks.causal(100))) == 1


def choose(names, problem: Problem, pieces: dict[str, Piece]) -> dict[str, set[str]]:
    works = {(RANKS, "mask", name): make_work(name, problem, RANKS, pieces) for name in names}
    predicted, steps = orders.predict(pieces, fit.first_fit()), {}
    for key, work in works.items():
        times, _ = commands.kernel_times(work, predicted, {})
        steps[key] = step_us(key[2], work, times, RANKS, Machine())
    return orders.choose(works, predicted, steps)


def test_all_ranks_that_may_be_the_slowest_are_chosen(problem):
    pieces: dict[str, Piece] = {}
    wanted = choose((OURS, "allgather_zigzag", "ring_contiguous"), problem, pieces)
    predicted = orders.predict(pieces, fit.first_fit())["forward"]
    for name in (OURS, "allgather_zigzag"):
        calls = make_work(name, problem, RANKS, {}).calls
        total = np.array([sum(predicted.get(key, 0.0) for key in row) for row in calls])
        for rank in np.flatnonzero(total >= 0.95 * total.max()):
            assert all("forward" in wanted[key] for key in calls[rank] if key), name


def test_the_slowest_rank_of_each_comes_first(problem):
    """However early the time ends, what is compared rests on measured calls."""
    pieces: dict[str, Piece] = {}
    names = OURS, "allgather_zigzag"
    wanted = list(choose(names, problem, pieces))
    predicted = orders.predict(pieces, fit.first_fit())
    first = set()
    for name in names:
        work = make_work(name, problem, RANKS, {})
        for which, calls in (("forward", work.calls), ("backward", work.backward_calls)):
            total = [sum(predicted[which].get(key, 0.0) for key in row) for row in calls]
            first |= {key for key in calls[np.argmax(total)] if key}
    assert set(wanted[: len(first)]) == first
    assert len(first) < len(wanted)


def test_orders_survive_their_file(problem, tmp_path):
    pieces: dict[str, Piece] = {}
    wanted = choose((OURS, "ring_zigzag"), problem, pieces)
    chosen = {k: orders.Order(pieces[k], tuple(sorted(v))) for k, v in wanted.items()}
    orders.save_orders(tmp_path / "orders.npz", chosen)
    loaded = orders.load_orders(tmp_path / "orders.npz")
    assert list(loaded) == list(chosen)
    for key, order in loaded.items():
        assert order.passes == chosen[key].passes
        np.testing.assert_array_equal(order.piece.slices, chosen[key].piece.slices)


def test_a_fit_gives_back_what_follows_its_features(problem, rng):
    pieces: dict[str, Piece] = {}
    make_work("ring_zigzag", problem, RANKS, pieces)
    weights = rng.uniform(1, 2, 16)
    points = [(f, float(f @ weights)) for f in map(fit.features, pieces.values())]
    fitted = fit.fit({"forward": points, "backward": points})
    assert fitted.errors["forward"][1] < 1e-6
    with pytest.raises(ValueError, match="no backward pass"):
        fit.fit({"forward": points, "backward": []})


@pytest.mark.parametrize("result", ["final", "first", "merged", "late"])
def test_calls_of_every_kind_are_timed(result, monkeypatch):
    for name in ("LEAD_US", "TIMED_US", "WARM_US"):
        monkeypatch.setattr(scaling_bench, name, 2e4)
    monkeypatch.setattr(scaling_bench, "HOST_SAMPLES", 2)
    piece = Piece(masks.causal(128).slices.astype(np.int32), 128, 128, 2, 1, result)
    bench = Bench(get_implementation("cpu"))
    assert bench.measure(piece, "forward") > 0
    assert bench.measure(piece, "backward") > 0


def test_pieces_are_visited_in_one_order_and_back(monkeypatch):
    monkeypatch.setattr(Bench, "measure", lambda self, piece, which, table: float(piece.q_len))
    lengths = 384, 128, 256
    pieces = [Piece(masks.full(n).slices.astype(np.int32), n, n, 2, 1) for n in lengths]
    chosen = {
        p.key: orders.Order(p, ("backward", "forward")[: i + 1]) for i, p in enumerate(pieces)
    }
    walked = measure._walk(list(chosen), chosen)
    half = len(walked) // measure.VISITS
    assert walked[half:] == walked[:half][::-1]
    assert [chosen[key].piece.q_len for key, _ in walked[:half]] == [128, 256, 384, 128, 256]
    found = measure.time_orders(chosen, 60.0, "cpu")
    for key, order in chosen.items():
        for which in order.passes:
            assert found[key]["visits"][which] == [float(order.piece.q_len)] * measure.VISITS
            assert found[key][which] == order.piece.q_len


def test_long_calls_over_whole_masks_are_visited_more_often(monkeypatch):
    monkeypatch.setattr(measure, "LONG_PAIRS", 2 * 256**2)
    lengths = 128, 256
    pieces = [Piece(masks.full(n).slices.astype(np.int32), n, n, 2, 1) for n in lengths]
    chosen = {p.key: orders.Order(p, ("forward",)) for p in pieces}
    walked = [chosen[key].piece.q_len for key, _ in measure._walk(list(chosen), chosen)]
    assert walked == [128, 256, 256, 128, 256, 256]
    # Of calls of which a visit has but one, the slowest asked for memory.
    assert measure.settled_us([5e5, 1e5, 2e5, 3e5]) == 2e5
    assert measure.settled_us([1e5, 3e5]) == 1e5
    assert measure.settled_us([1e3, 3e3]) == 2e3
    assert measure.settled_us([1e5]) == 1e5


def test_times_are_measured_where_they_are_known(problem):
    pieces: dict[str, Piece] = {}
    work = make_work("allgather_zigzag", problem, RANKS, pieces)
    predicted = orders.predict(pieces, fit.first_fit())
    first = work.calls[0, 0]
    timed = {first: {"forward": 2 * predicted["forward"][first]}}
    times, measured = commands.kernel_times(work, predicted, timed)
    others = work.calls != first
    assert (times.forward == measured.forward)[~others].all()
    assert not measured.forward[others].any()
    for place in np.argwhere(others & (work.calls != "")):
        by_fit = predicted["forward"][work.calls[tuple(place)]]
        # As far off as what was timed, but for doubt.
        expected = 2 ** (1 / (1 + commands.DOUBT)) * by_fit
        np.testing.assert_allclose(times.forward[tuple(place)], expected)
    by_fit = [[predicted["backward"].get(key, 0.0) for key in row] for row in work.backward_calls]
    np.testing.assert_allclose(times.backward, by_fit)


@pytest.mark.parametrize("ranks", [8, 32])
def test_time_is_kernels_and_what_cannot_hide(problem, ranks):
    """Just the kernels of a rank where links and sums cost nothing; a slower link never helps."""
    free = Machine(near=1e18, far=1e18, near_latency_us=0, far_latency_us=0, memory=1e18)
    for name in scaling_work.strategy_names(problem, ranks):
        work = make_work(name, problem, ranks, {})
        shape, backward_shape = work.calls.shape, work.backward_calls.shape
        times = Times(np.full(shape, 100.0), np.full(backward_shape, 300.0))
        if work.travel_calls is not None:
            times = times._replace(travel_forward=np.ones(ranks), travel_backward=np.ones(ranks))
        ideal = step_us(name, work, times, ranks, free)
        real = step_us(name, work, times, ranks, Machine())
        slow = step_us(name, work, times, ranks, Machine(near=45e3, far=5e3))
        for which in ("forward", "backward"):
            kernels = times.kernel_us(which).max()
            np.testing.assert_allclose(ideal[which], kernels, rtol=1e-6, err_msg=name)
            assert kernels <= real[which] <= slow[which], name


def test_a_ring_waits_for_its_slowest_link():
    """Two nodes of 8 in one ring: with kernels that take nothing, a step takes the hop between nodes."""
    ranks, rows = 16, 8192
    calls = np.full((ranks, ranks), "")
    work = Work(calls, calls, rows)
    nothing = np.zeros((ranks, ranks))
    machine = Machine(near_latency_us=0, far_latency_us=0, memory=1e18)
    found = step_us("ring_contiguous", work, Times(nothing, nothing), ranks, machine)
    shard = rows * 2 * scaling_work.NUM_KV_HEADS * scaling_work.HEAD_DIM * 2
    hop = shard / machine.far
    # Blocks that cross the slow link once need it once; those that follow are held up behind it.
    assert found["forward"] == pytest.approx((ranks - 1) * hop, rel=0.5)
    first = calls[:, :1], calls[:, :1], rows
    gather = step_us(
        "allgather_zigzag", Work(*first), Times(nothing[:, :1], nothing[:, :1]), ranks, machine
    )
    slower = max((ranks - 1) * shard / machine.near, shard / machine.far)
    assert gather["forward"] == pytest.approx(slower)


def test_other_links_change_ratios_to_those_who_hide_nothing():
    problem = Problem(masks.varlen(LENGTHS, causal=True), LENGTHS)
    pieces: dict[str, Piece] = {}
    works = {
        (32, "varlen", name): make_work(name, problem, 32, pieces) for name in (OURS, "ulysses")
    }
    works[8, "varlen", "ulysses"] = make_work("ulysses", problem, 8, pieces)
    predicted = orders.predict(pieces, fit.first_fit())
    times = {key: commands.kernel_times(work, predicted, {})[0] for key, work in works.items()}
    slow_near, slow_far, fast_far = links.with_other_links(works, times)
    assert "as measured" in slow_near["what"]
    for found in (slow_near, slow_far, fast_far):
        assert len(found[OURS]) == 2
        assert "magi_jax_alike" not in found
    for slow, fast in zip(slow_far[OURS], fast_far[OURS], strict=True):
        assert slow > fast
