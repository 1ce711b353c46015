"""Plans whose rows cross between nodes once: exact, without redundancy, in specs of either kind."""

import dataclasses

import jax
import numpy as np
import pytest
from plan_checks import check_plan
from plan_simulation import computed_cells

from magi_jax import AttnMask, MaskType, masks
from magi_jax.plan import CommMeta, PlanConfig, TwoLevelComm, make_plan, stack_plans
from magi_jax.plan.two_level import in_two_steps, rows_between
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.overlap.choose_stages import BACKWARD_ORDERS, LONG_ORDERS
from magi_jax.testing import cases

SIZE = 131
NODES = PlanConfig(
    chunk_size=8, overlap=(2, 3), ranks_per_node=2, two_level=True, travelling=((50, 53),)
)
SLOW_BETWEEN_NODES = CostModel(node_link_gbps=0.1, latency_us=0.0)
MASK = masks.causal(SIZE) | masks.global_rows(SIZE, rows=(50, 53))


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_every_cell_once_and_every_row_once_per_node(ranks_per_node, rng):
    config = dataclasses.replace(NODES, ranks_per_node=ranks_per_node)
    for mask in (MASK, cases.random_mask(rng, SIZE, SIZE, 20)):
        plan = make_plan(mask, 8, config)
        comms = (*plan.comm, *plan.backward.comm, *([plan.travel.comm] if plan.travel else []))
        assert all(isinstance(comm, TwoLevelComm) for comm in comms)
        check_plan(plan, mask, walk=mask is MASK)
        twin = make_plan(mask, 8, dataclasses.replace(config, engine="numpy"))
        assert twin.fingerprint() == plan.fingerprint()
        assert plan.fingerprint() == make_plan(mask, 8, config).fingerprint()


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_stages_of_own_nodes_need_not_cross(ranks_per_node, rng):
    overlap = (True, False), (True, False, True)
    config = dataclasses.replace(NODES, ranks_per_node=ranks_per_node, overlap=overlap)
    for mask in (MASK, cases.random_mask(rng, SIZE, SIZE, 20), masks.local(SIZE, window=(3, 0))):
        plan = make_plan(mask, 8, config)
        for found, wanted in zip((plan.comm, plan.backward.comm), overlap, strict=True):
            assert [isinstance(comm, CommMeta) for comm in found] == list(wanted)
        check_plan(plan, mask, walk=mask is MASK)
        twin = make_plan(mask, 8, dataclasses.replace(config, engine="numpy"))
        assert twin.fingerprint() == plan.fingerprint()
        alike = make_plan(mask, 8, dataclasses.replace(config, overlap=(2, 3)))
        if plan.travel is None:
            assert plan.report().crossing_rows.sum() == alike.report().crossing_rows.sum()
        both = plan.spec.union(alike.spec)
        assert both == alike.spec.union(plan.spec)
        assert not any(both.forward_stages.near + both.backward_stages.near)
        check_plan(alike.pad_to(both), mask, walk=False)
        cells = computed_cells(plan.pad_to(both), walk=False)
        np.testing.assert_array_equal(cells[: mask.q_len, : mask.k_len], mask.dense())
        with pytest.raises(ValueError, match="must be a"):
            alike.pad_to(plan.spec.scaled(3.0))
    wide = plan.spec.union(make_plan(MASK, 8, config).spec).scaled(2.0)
    assert (wide.forward_stages.near, wide.backward_stages.near) == overlap
    check_plan(plan.pad_to(wide), mask, walk=False)
    fitted = make_plan(MASK, 8, PlanConfig(chunk_size=8, travelling=NODES.travelling), wide)
    check_plan(fitted, MASK, walk=False)
    with pytest.raises(ValueError, match=r"no stage has the rows of other nodes"):
        make_plan(MASK, 8, dataclasses.replace(config, overlap=((True,), (True, False))))
    with pytest.raises(ValueError, match="want rows to take two steps"):
        make_plan(MASK, 8, dataclasses.replace(config, two_level=False))


def test_own_nodes_come_first_where_others_are_far_away():
    model = CostModel(node_link_gbps=20.0)
    config = PlanConfig(ranks_per_node=4, cost_model=model, two_level=True)
    plan = make_plan(masks.causal(65536), 8, config)
    assert plan.spec.forward_stages.near[0]
    assert plan.spec.backward_stages.near[0]
    for overlap in (1, 2, 3, 4):
        other = make_plan(masks.causal(65536), 8, dataclasses.replace(config, overlap=overlap))
        assert plan.report(model).predicted_us < other.report(model).predicted_us


def test_long_orders_of_stages_hide_most_backward():
    """One causal mask over many nodes; no list of the same kind is predicted to take less."""
    mask = masks.causal(64 * 8192)
    config = PlanConfig(ranks_per_node=8, cost_model=CostModel(link_gbps=450.0, latency_us=20.0))

    def backward_us(plan):
        return plan.report(config.cost_model, 8).backward.predicted_us

    plan = make_plan(mask, 64, config)
    assert plan.spec.backward_stages.near in LONG_ORDERS
    for near in (*BACKWARD_ORDERS, *LONG_ORDERS):
        other = make_plan(mask, 64, dataclasses.replace(config, overlap=(1, near)))
        assert backward_us(plan) <= backward_us(other)


def test_the_cost_model_chooses():
    config = PlanConfig(ranks_per_node=8)
    wanted = {"full": masks.full(65536), "window": masks.local(65536, window=(255, 0))}
    plans = {name: make_plan(mask, 16, config) for name, mask in wanted.items()}
    assert plans["full"].spec.ranks_per_node == 8
    assert plans["window"].spec.ranks_per_node is None
    for name, plan in plans.items():
        others = [
            make_plan(wanted[name], 16, dataclasses.replace(config, two_level=way))
            for way in (False, True)
        ]
        least_us = min(other.report(ranks_per_node=8).predicted_us for other in others)
        assert plan.report(ranks_per_node=8).predicted_us <= 1.02 * least_us
    for one_node in (PlanConfig(), PlanConfig(ranks_per_node=16)):
        assert make_plan(wanted["full"], 16, one_node).spec.ranks_per_node is None


def test_specs_of_both_kinds_unite():
    two = make_plan(MASK, 8, NODES)
    one = make_plan(masks.full(SIZE), 8, dataclasses.replace(NODES, two_level=False))
    both = one.spec.union(two.spec)
    assert both == two.spec.union(one.spec)
    assert both.ranks_per_node == 2
    assert one.spec.shortfall(two.spec) == "spec has transfers in one step, but two are needed"
    padded = [plan.pad_to(both) for plan in (one, two)]
    check_plan(padded[1], MASK, walk=False)
    # Its stages were cut for one step: exact, but a row may enter a node in several of them.
    np.testing.assert_array_equal(computed_cells(padded[0], walk=False), masks.full(SIZE).dense())
    stacked = stack_plans(padded)
    assert stacked.spec == both
    assert jax.tree.leaves(stacked)[0].shape[:2] == (2, 8)
    wide = two.spec.scaled(1.5)
    assert wide.covers(two.spec)
    check_plan(two.pad_to(wide), MASK, walk=False)


def test_scaled_stages_have_room_for_rows_of_own_nodes():
    """The last stage of a sample had rows of other nodes alone; in a later plan it has rows of all."""
    mask = masks.causal(4096)
    config = PlanConfig(chunk_size=64, ranks_per_node=4, two_level=True)
    near, even, later = (
        dataclasses.replace(config, overlap=(stages, stages))
        for stages in ((True, False, False), 2, 3)
    )
    union = make_plan(mask, 8, near).spec.union(make_plan(mask, 8, even).spec)
    assert not any(union.forward_stages.near)
    assert union.comm[2].first.self_rows < union.comm[1].first.self_rows
    wide = union.scaled(2.0)
    plan = make_plan(mask, 8, later, wide)
    assert plan.spec == wide
    check_plan(plan, mask, walk=False)


def test_a_spec_settles_the_way():
    two = make_plan(MASK, 8, NODES)
    window = masks.local(SIZE, window=(9, 0))
    auto = PlanConfig(chunk_size=8)
    plan = make_plan(window, 8, auto, two.spec.scaled(2.0))
    assert plan.spec.ranks_per_node == 2
    check_plan(plan, window, walk=False)
    flat = make_plan(MASK, 8, dataclasses.replace(NODES, two_level=False)).spec
    assert make_plan(MASK, 8, auto, flat.scaled(2.0)).spec.ranks_per_node is None
    with pytest.raises(ValueError, match="spec has transfers in one step, but two_level=True"):
        make_plan(MASK, 8, NODES, flat)
    with pytest.raises(ValueError, match="spec has transfers in two steps, but two_level=False"):
        make_plan(MASK, 8, dataclasses.replace(NODES, two_level=False), two.spec)
    with pytest.raises(ValueError, match="nodes of 2 ranks, but ranks_per_node=4"):
        make_plan(MASK, 8, dataclasses.replace(auto, ranks_per_node=4), two.spec)


def test_another_mask_keeps_the_nodes():
    plan = make_plan(MASK, 8, NODES)
    wider = masks.full(SIZE)
    other = plan.with_mask(wider, overlap=2, machine=Machine(2, SLOW_BETWEEN_NODES))
    assert other.spec.ranks_per_node == 2
    check_plan(other, wider, walk=False)
    assert plan.with_mask(wider, overlap=2).report(ranks_per_node=2).ranks_per_node == 2
    with pytest.raises(
        ValueError, match=r"spec\.\w+\[0\]\.(across|within)\.\w+ is \d+, but \d+ is needed"
    ):
        plan.with_mask(wider, overlap=(2, 3), travelling="never", spec=plan.spec)


def test_the_report_counts_rows_between_nodes(tmp_path):
    plan = make_plan(masks.full(256), 8, dataclasses.replace(NODES, travelling="never"))
    report = plan.report()
    assert (report.ranks_per_node, report.two_level) == (2, True)
    assert report.recv_rows.tolist() == [224] * 8
    # Each node lacks 192 rows; each of its ranks brings those of the ranks with its place.
    assert report.crossing_rows.tolist() == [96] * 8
    assert "768 in all, once per node" in str(report)
    assert report.collective_rows == sum(
        4 * c.across.pair_rows + 2 * c.within.pair_rows for c in plan.comm
    )
    flat = make_plan(masks.full(256), 8, dataclasses.replace(NODES, two_level=False))
    assert flat.report(ranks_per_node=2).crossing_rows.tolist() == [192] * 8
    assert "once per rank" in str(flat.report(ranks_per_node=2))
    assert flat.report().crossing_rows.sum() == 0
    assert report.predicted_us < flat.report(ranks_per_node=2).predicted_us
    with pytest.raises(ValueError, match="nodes of 2 ranks, but ranks_per_node=4"):
        plan.report(ranks_per_node=4)
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_bad_options():
    with pytest.raises(ValueError, match="two_level=True needs ranks_per_node"):
        PlanConfig(two_level=True)
    with pytest.raises(ValueError, match=r'two_level must be True, False or "auto", got 1\.5'):
        PlanConfig(two_level=1.5)
    config = dataclasses.replace(NODES, ranks_per_node=3, dispatch="zigzag")
    with pytest.raises(ValueError, match="8 ranks are not whole nodes of 3"):
        make_plan(MASK, 8, config)
    assert np.isfinite(make_plan(masks.empty(SIZE), 8, NODES).report().predicted_us)


def test_rows_that_enter_a_rank_from_other_nodes_are_counted_where_they_arrive():
    """In a window the first rank of the second node alone needs rows of the first node."""
    config = PlanConfig(dispatch="contiguous", ranks_per_node=2, two_level=False)
    plan = make_plan(masks.local(256, window=(31, 0)), 4, config)
    assert plan.report(ranks_per_node=2).crossing_rows.tolist() == [0, 0, 31, 0]


def test_sizes_for_two_steps_have_room_for_other_rows_to_each_rank_of_a_node():
    """Eight rows of rank 0 for each of two ranks, sixteen for their node."""
    mask = AttnMask.from_slices([(32, 48), (48, 64)], [(0, 8), (8, 16)], MaskType.FULL, q_len=64)
    config = PlanConfig(chunk_size=16, dispatch="contiguous", overlap=1, travelling="never")
    (comm,) = make_plan(mask, 4, config).comm
    assert comm.pair_rows == 8
    split = in_two_steps(comm, 2, comm.spec.in_two(2))
    assert rows_between(split).tolist() == rows_between(comm).tolist()
