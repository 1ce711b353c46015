"""The cost model and the predicted timelines, against figures worked out by hand."""

import json

import numpy as np
import pytest

from magi_jax import masks
from magi_jax.solver import timeline
from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.stages import StageSlices

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


def work_of(forward, cast, reduce, merge_us=0.0):
    forward, cast, reduce = (
        np.array(part, float).reshape(len(part), -1) for part in (forward, cast, reduce)
    )
    return timeline.StageWork(forward, 2 * forward, cast, reduce, merge_us)


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


def test_move_times_take_the_worse_of_both_directions():
    traffic = np.zeros((1, 4, 4))
    traffic[0, 0, 1:] = 10  # rank 0 sends ten rows to each: one in its node, two across
    cast_us, _ = timeline.move_times(traffic, 2, PLAIN)
    assert cast_us[0].tolist() == pytest.approx([2 + 80, 2 + 4, 2 + 40, 2 + 40])


def test_forward_hides_casts_behind_kernels():
    hidden = timeline.simulate(work_of([10, 10, 10], [8, 9], [0, 0]))
    assert hidden.predicted_us == 30
    assert hidden.cast[:, 0].tolist() == [[0, 8], [10, 19]]
    waiting = timeline.simulate(work_of([10, 10, 10], [25, 9], [0, 0]))
    assert waiting.compute[:, 0].tolist() == [[0, 10], [25, 35], [35, 45]]
    assert waiting.efficiency(np.full((3, 1), 10.0)) == pytest.approx(30 / 45)


def test_backward_ends_with_the_last_reduce():
    # Kernels take twice as long; the second reduce waits for its kernel.
    backward = timeline.simulate(work_of([10, 10, 10], [5, 5], [7, 7]), backward=True)
    assert backward.compute[-1, 0].tolist() == [40, 60]
    assert backward.reduce[:, 0].tolist() == [[40, 47], [60, 67]]
    assert backward.predicted_us == 67


def test_merging_costs_once_for_each_remote_stage():
    assert timeline.simulate(work_of([10, 10, 10], [1, 1], [0, 0], merge_us=3)).predicted_us == 36


def test_the_fastest_of_one_to_four_stages_is_chosen():
    rng = np.random.default_rng(3)
    chosen = set()
    for _ in range(60):
        model = CostModel(link_gbps=10 ** rng.uniform(0, 4), latency_us=10 ** rng.uniform(-1, 3))
        local = StageSlices(masks.causal(4096).slices, np.array([0]))
        far = StageSlices(np.concatenate([masks.full(2048).slices] * 2), np.array([0, 1]))
        traffic = rng.integers(0, 20000, (1, 2, 2)) * (1 - np.eye(2, dtype=int))
        works = timeline.even_stages([local, far], traffic, 4096, 2, model)
        assert [len(work.cast_us) for work in works] == [1, 2, 3, 4]
        times = [
            timeline.simulate(work).predicted_us + timeline.simulate(work, True).predicted_us
            for work in works
        ]
        best = timeline.fastest(works)
        if timeline.splitting_is_vain(traffic, 4096, 2, model):
            assert best == 0
        chosen.add(best)
        assert times[best] == min(times)
    assert len(chosen) > 1


def test_cutting_a_stage_keeps_its_rows_and_lowers_its_rate():
    far = StageSlices(masks.full(500).slices, np.array([0]))
    traffic = np.array([[[0, 0], [1200, 0]]])
    model = CostModel(latency_us=0.0)
    works = timeline.even_stages([far, far], traffic, 500, 2, model)
    for work in works[1:]:
        assert work.cast_us.sum() == pytest.approx(works[0].cast_us.sum())
        assert work.forward_us[0].tolist() == works[0].forward_us[0].tolist()
        assert work.forward_us[1:].sum() > works[0].forward_us[1:].sum()


def test_stage_work_adds_the_slices_of_a_rank():
    local = StageSlices(np.concatenate([masks.full(500).slices] * 2), np.array([0, 1]))
    far = StageSlices(masks.full(500).slices, np.array([1]))
    traffic = np.array([[[0, 100], [0, 0]]])
    work = timeline.stage_work([local, far], traffic, 10, 2, PLAIN)
    assert work.forward_us.tolist() == [pytest.approx([1000, 1000]), pytest.approx([0, 1000])]
    assert work.cast_us.tolist() == [[42.0, 42.0]]


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
