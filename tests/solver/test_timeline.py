"""The cost model and the predicted timelines, against figures worked out by hand."""

import json

import numpy as np
import pytest

from magi_jax import masks
from magi_jax.masks import bands
from magi_jax.solver import dispatch
from magi_jax.solver.cost import schedule, timeline
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.overlap.choose_stages import BACKWARD_ORDERS, FORWARD_ORDERS, choose_stages
from magi_jax.solver.overlap.stage_times import CompiledTimes, Kind, NumpyTimes
from magi_jax.solver.overlap.travelling import Ranges, split_slices
from magi_jax.solver.work.find_work import Keys, find_work, traffic
from magi_jax.solver.work.stages import StageSlices
from magi_jax.testing.cases import mask_cases

PLAIN = CostModel(
    num_heads=10,
    num_kv_heads=1,
    head_dim=100,
    forward_tflops=((1, 1.0), (1000, 1.0)),
    backward_tflops=((1, 0.5), (1000, 0.5)),
    link_gbps=1.0,
    node_link_gbps=0.1,
    latency_us=2.0,
)


def work_of(kernel, cast, reduce, merge_us=0.0, travel=None):
    kernel, cast, reduce = (
        np.array(part, float).reshape(len(part), -1) for part in (kernel, cast, reduce)
    )
    if travel is not None:
        travel = timeline.TravelWork(*(np.array([part], float) for part in travel), merge_us)
    return timeline.DirectionWork(kernel, cast, reduce, merge_us, travel)


def test_kernel_time_is_flops_over_rate():
    slices = masks.full(500).slices
    # 4 * 250,000 pairs * 10 heads * 100 dims = 1 GFLOP at 1 TFLOP/s.
    assert PLAIN.kernel_us(slices) == pytest.approx([1000.0])
    assert PLAIN.kernel_us(slices, backward=True) == pytest.approx([5000.0])


def test_rate_rises_with_keys_per_row():
    model = CostModel()
    area_us = [model.kernel_us(masks.full(k).slices)[0] / k**2 for k in (64, 500, 4096, 100000)]
    assert (np.diff(area_us) < 0).all()
    assert model.kernel_us(np.zeros((1, 6), np.int64)).tolist() == [0.0]


def test_transfer_time_is_that_of_the_busier_link():
    # A row is 2 * 1 * 100 * 2 = 400 bytes; 0.4 us inside a node, 4 us across.
    assert PLAIN.cast_us(np.array([100, 100, 0]), np.array([0, 30, 0])).tolist() == [
        42.0,
        122.0,
        0.0,
    ]
    assert PLAIN.reduce_us(np.array([100]), np.array([0])).tolist() == [82.0]


def test_a_rank_is_held_up_by_the_worse_of_both_directions():
    traffic = np.zeros((1, 4, 4))
    traffic[0, 0, 1:] = 10  # rank 0 sends ten rows to each: one in its node, two across
    cast_us = PLAIN.cast_us(*timeline.link_rows(traffic, 2))
    assert cast_us[0].tolist() == pytest.approx([2 + 80, 2 + 4, 2 + 40, 2 + 40])


def test_forward_hides_casts_behind_kernels():
    hidden = schedule.simulate(work_of([10, 10, 10], [8, 9], [0, 0]))
    assert hidden.predicted_us == 30
    assert hidden.cast[:, 0].tolist() == [[0, 8], [10, 19]]
    work = work_of([10, 10, 10], [25, 9], [0, 0])
    waiting = schedule.simulate(work)
    assert waiting.compute[:, 0].tolist() == [[0, 10], [25, 35], [35, 45]]
    assert waiting.efficiency(work.busy_us) == pytest.approx(30 / 45)


def test_backward_ends_with_the_last_reduce():
    # The second reduce waits for its kernel.
    backward = schedule.simulate(work_of([20, 20, 20], [5, 5], [7, 7]))
    assert backward.compute[-1, 0].tolist() == [40, 60]
    assert backward.reduce[:, 0].tolist() == [[40, 47], [60, 67]]
    assert backward.predicted_us == 67


def test_backward_computes_own_keys_last_beside_the_last_reduce():
    work = work_of([20, 10, 10], [5, 5], [7, 30])._replace(own_keys_last=True)
    found = schedule.simulate(work)
    assert found.cast[:, 0].tolist() == [[0, 5], [5, 10]]
    assert found.compute[:, 0].tolist() == [[25, 45], [5, 15], [15, 25]]
    assert found.reduce[:, 0].tolist() == [[15, 22], [25, 55]]
    assert found.predicted_us == 55


def test_backward_in_two_steps_waits_for_the_last_step_inside_the_node():
    work = work_of([20, 10], [5], [7])._replace(own_keys_last=True)
    found = schedule.simulate(work._replace(within_us=np.array([[[2.0]], [[3.0]]])))
    assert found.cast[0, 0].tolist() == [0, 5]
    assert found.within[:, 0, 0].tolist() == [[5, 7], [17, 20]]
    assert found.compute[:, 0].tolist() == [[20, 40], [7, 17]]
    assert found.reduce[0, 0].tolist() == [20, 27]


@pytest.mark.parametrize("name", ["varlen_causal", "block_causal_global", "causal", "empty"])
def test_engines_predict_the_same_times(name):
    rng = np.random.default_rng(len(name))
    mask = {**mask_cases(384), "empty": masks.empty(384)}[name]
    edges = dispatch.chunk_edges(384, 13)
    owner = rng.permutation(np.arange(len(edges) - 1) % 6)
    layout = dispatch.make_layout(dispatch.Assignment(edges, owner), 6)
    machine = Machine(2, CostModel(node_link_gbps=5.0, latency_us=0.5))
    for ranges in (Ranges(*np.zeros((2, 0), np.int64)), Ranges(np.array([40]), np.array([90]))):
        home, away = split_slices(mask.slices, ranges)
        works = [find_work(home, away, layout, Keys(layout, 78), e) for e in ("numpy", "compiled")]
        twin, compiled = NumpyTimes(works[0], 78, machine), CompiledTimes(works[1], 78, machine)
        for two_level in (False, True):
            for a, b in zip(twin.held_up(two_level), compiled.held_up(two_level), strict=True):
                assert a.tolist() == b.tolist()
            kinds = [(1, False), (2, False), (4, False), (3, True), (4, True)]
            kinds = [Kind(*kind, two_level) for kind in kinds]
            if two_level:
                orders = FORWARD_ORDERS + BACKWARD_ORDERS
                kinds += [Kind(len(near), False, True, near) for near in orders]
            for kind in kinds:
                assert compiled.times_us(kind) == pytest.approx(twin.times_us(kind), rel=1e-12)
                staged = [times.staged(kind) for times in (compiled, twin)]
                assert all(map(np.array_equal, staged[0].remote, staged[1].remote))
        choices = [choose_stages(work, 78, machine) for work in works]
        assert choices[0].two_level == choices[1].two_level
        for way in ("forward", "backward"):
            remote = [getattr(choice, way).remote for choice in choices]
            assert all(map(np.array_equal, *remote))


def test_merging_costs_once_for_each_remote_stage():
    assert schedule.simulate(work_of([10, 10, 10], [1, 1], [0, 0], merge_us=3)).predicted_us == 36


def test_travelling_queries_leave_first_and_return_behind_the_next_cast():
    work = work_of([10, 10], [8], [0], merge_us=1, travel=(4, 6, 5))
    found = schedule.simulate(work)
    assert found.travel[:, 0].tolist() == [[0, 4], [10, 16], [16, 21]]
    assert found.cast[0, 0].tolist() == [4, 12]
    assert found.compute[:, 0].tolist() == [[0, 10], [16, 28]]
    assert work.busy_us == 26
    late = schedule.simulate(work_of([10, 10], [8], [0], merge_us=1, travel=(4, 6, 50)))
    assert late.predicted_us == 16 + 50 + 1


def test_the_fastest_of_one_to_four_stages_is_chosen_for_each_direction():
    rng = np.random.default_rng(3)
    chosen = set()
    mask = masks.causal(4096)
    problem = dispatch.DispatchProblem(mask.slices, dispatch.chunk_edges(4096, 512), 2)
    layout = dispatch.make_layout(dispatch.contiguous(problem), 2)
    work = find_work(mask.slices, mask.slices[:0], layout, Keys(layout, 2048))
    for _ in range(60):
        model = CostModel(
            link_gbps=10 ** rng.uniform(0, 3), latency_us=10 ** rng.uniform(-1, 2), memory_gbps=1e5
        )
        choice = choose_stages(work, 2048, Machine(None, model))
        least_us = 0.0
        for backward, staged in enumerate((choice.forward, choice.backward)):
            kinds = [(n, False) for n in range(1, 5)]
            times_us = [predict(work, *kind, model, bool(backward)) for kind in kinds]
            count = staged.num_remote_stages
            rows = timeline.link_rows(traffic(staged.remote, count, 2), 2)
            direction = timeline.direction_work(
                timeline.shapes_of(staged.slices, 2, model), rows, True, model, bool(backward)
            )
            found_us = schedule.simulate(direction).predicted_us
            assert found_us <= min(times_us)
            least_us += found_us
            chosen.add((bool(backward), count))
        assert choice.predicted_us == pytest.approx(least_us + model.convert_us(2048))
    assert len({count for backward, count in chosen if backward}) > 1
    assert len({count for backward, count in chosen if not backward}) > 1


def predict(work, count, turned, model, backward):
    """Predicted time of one direction in ``count`` equal stages on two ranks."""
    staged = work.staged(count, turned)
    rows = timeline.link_rows(traffic(staged.remote, count, 2), 2)
    direction = timeline.direction_work(
        timeline.shapes_of(staged.slices, 2, model, "compiled"), rows, True, model, backward
    )
    return schedule.simulate(direction).predicted_us


def test_cutting_a_stage_keeps_its_rows_and_lowers_its_rate():
    far = StageSlices(masks.full(500).slices, np.array([0]))
    half = StageSlices(bands.clip(far.slices, k_end=250), np.array([0]))
    model = CostModel()
    whole_us, half_us = (
        timeline.shapes_of([s], 2, model).kernel_us(model, backward=False) for s in (far, half)
    )
    assert whole_us[0, 0] < 2 * half_us[0, 0]


def test_direction_work_adds_the_slices_of_a_rank():
    local = StageSlices(np.concatenate([masks.full(500).slices] * 2), np.array([0, 1]))
    far = StageSlices(masks.full(500).slices, np.array([1]))
    rows = timeline.link_rows(np.array([[[0, 100], [0, 0]]]), 2)
    shapes = timeline.shapes_of([local, far], 2, PLAIN)
    work = timeline.direction_work(shapes, rows, True, PLAIN, backward=False)
    assert work.kernel_us.tolist() == [pytest.approx([1000, 1000]), pytest.approx([0, 1000])]
    assert work.cast_us.tolist() == [[42.0, 42.0]]
    assert work.reduce_us.tolist() == [[0.0, 0.0]]
    back = timeline.direction_work(shapes, rows, True, PLAIN, backward=True)
    assert back.reduce_us.tolist() == [[82.0, 82.0]]


def test_travelling_rows_weigh_queries_and_outputs():
    away = StageSlices(masks.full(500).slices, np.array([1]))
    rows = timeline.link_rows(np.array([[0, 100], [0, 0]]), 2)
    work = timeline.travel_work(away, rows, 10, PLAIN, backward=False)
    # 10 heads of 100 dims: 2,000 bytes out, 4,040 back at 1 GB/s, and 2 us of latency.
    assert work.out_us.tolist() == [202.0, 202.0]
    assert work.return_us.tolist() == [406.0, 406.0]
    assert work.kernel_us.tolist() == pytest.approx([0, 1000])


def test_measured_tables_are_loaded_and_checked(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"link_gbps": 300, "forward_tflops": [[64, 100], [4096, 700]]}))
    model = CostModel.from_json(path)
    assert model.link_gbps == 300
    assert model.forward_tflops == ((64, 100), (4096, 700))
    assert hash(model) == hash(CostModel.from_json(path))
    path.write_text(json.dumps({"bandwidth": 3}))
    with pytest.raises(ValueError, match="unknown entries \\['bandwidth'\\]"):
        CostModel.from_json(path)
    with pytest.raises(ValueError, match="rising keys"):
        CostModel(forward_tflops=((64, 1.0), (64, 2.0)))
    with pytest.raises(ValueError, match="link_gbps must be positive, got 0"):
        CostModel(link_gbps=0)


def test_kernels_of_travelling_queries_take_longer_backwards():
    slices = StageSlices(np.array([[0, 64, 0, 4096, -63, 4095]], np.int64), np.array([1], np.int64))
    rows = np.zeros(2), np.zeros(2)
    forward, backward = (
        timeline.travel_work(slices, rows, 64, PLAIN, backward=backward).kernel_us
        for backward in (False, True)
    )
    assert forward[0] == backward[0] == 0.0
    assert backward[1] > forward[1] > 0.0
