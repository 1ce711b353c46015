"""A plan as a value: hashed, stacked, sharded, passed to compiled programs, planned again, drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from plan_checks import check_plan
from test_make_plan import varlen_causal

from magi_jax import masks
from magi_jax.plan import PlanConfig, make_plan, slice_table, stack_plans
from magi_jax.plan.plot import sampled_owners

CONFIG = PlanConfig(chunk_size=8, tile_size=16, overlap=(2, 1), travelling=((50, 53),))
MASK = varlen_causal([100, 30, 61])


def with_leaf(plan, index, change):
    """The plan with one leaf changed."""
    leaves, tree = jax.tree.flatten(plan)
    leaves[index] = change(leaves[index].copy())
    return jax.tree.unflatten(tree, leaves)


def test_a_plan_shows_its_sizes_and_not_its_tables():
    plan = make_plan(MASK, 4, CONFIG)
    shown = repr(plan)
    assert shown.startswith("AttentionPlan(cp_size=4, seq_len=191, local_len=")
    assert len(shown) < 150
    assert repr(jax.tree.map(lambda _: None, plan)) == shown
    table = plan.local(0).calc[0]
    shown = f"SliceTable(q_len={table.q_len}, k_len={table.k_len}, tile_size=16)"
    assert repr(table) == repr(jax.tree.map(lambda _: None, table)) == shown


def test_fingerprint_sees_every_leaf_and_the_spec():
    plan = make_plan(MASK, 4, CONFIG)
    own = plan.fingerprint()
    assert len(own) == 32
    assert own == make_plan(MASK, 4, CONFIG).fingerprint()
    assert own == jax.tree.map(jnp.asarray, plan).fingerprint()
    changed = {own}
    for i in range(len(jax.tree.leaves(plan))):
        changed.add(with_leaf(plan, i, lambda leaf: leaf + 1).fingerprint())
    spec = dataclasses.replace(plan.spec, chunk_size=9)
    changed.add(dataclasses.replace(plan, spec=spec).fingerprint())
    assert len(changed) == len(jax.tree.leaves(plan)) + 2


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8, jnp.int32])
def test_numbers_of_numpy_plan_the_same(number):
    config = PlanConfig(seq_len=200, chunk_size=8, tile_size=16, overlap=(2, 1), ranks_per_node=2)
    same = PlanConfig(
        seq_len=number(200),
        chunk_size=number(8),
        tile_size=number(16),
        overlap=(np.int64(2), np.int32(1)),
        ranks_per_node=number(2),
    )
    assert same == config
    plan, again = make_plan(MASK, 4, config), make_plan(MASK, number(4), same)
    assert again.fingerprint() == plan.fingerprint()
    assert hash(again.spec) == hash(plan.spec)


@pytest.mark.parametrize("name", ["seq_len", "chunk_size", "ranks_per_node", "tile_size"])
def test_sizes_are_integers(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer, got 8.0"):
        PlanConfig(**{name: 8.0})


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("overlap must be", {"overlap": 0}),
        ("overlap must be", {"overlap": 1.5}),
        ("travelling must be", {"travelling": "often"}),
        ("travelling must list", {"travelling": [(8, 16), (0, 4)]}),
        ("travelling must list", {"travelling": [(-3, 4)]}),
        ("engine must be", {"engine": "quantum"}),
    ],
)
def test_with_mask_refuses_what_a_config_refuses(match, options):
    with pytest.raises(ValueError, match=match):
        PlanConfig(**options)
    with pytest.raises(ValueError, match=match):
        make_plan(MASK, 4, CONFIG).with_mask(MASK, **options)


def test_with_mask_takes_arrays_of_ranges():
    plan = make_plan(MASK, 4, CONFIG)
    listed = plan.with_mask(MASK, overlap=2, travelling=[(50, 53)])
    given = plan.with_mask(MASK, overlap=np.int64(2), travelling=np.array([[50, 53]]))
    assert given.fingerprint() == listed.fingerprint()


def test_planning_time_is_no_part_of_the_tree():
    plan = make_plan(MASK, 4, CONFIG)
    assert plan.planning_ms > 0
    assert plan.report().planning_ms == plan.planning_ms
    mapped = jax.tree.map(np.copy, plan)
    assert mapped.planning_ms is None
    assert "planning           -" in str(mapped.report())
    assert jax.tree.structure(mapped) == jax.tree.structure(plan)


def test_one_trace_for_plans_of_one_spec():
    lengths = [[100, 30, 61], [11, 150, 30], [190, 1]]
    config = dataclasses.replace(CONFIG, seq_len=191)
    spec = make_plan(varlen_causal(lengths[0]), 4, config).spec
    for other in lengths[1:]:
        spec = spec.union(make_plan(varlen_causal(other), 4, config).spec)
    traces = []

    @jax.jit
    def step(plan):
        traces.append(1)
        return plan.positions.sum() + plan.calc[1].slices.sum()

    for each in lengths:
        plan = make_plan(varlen_causal(each), 4, config, spec=spec)
        assert step(plan) == plan.positions.sum() + plan.calc[1].slices.sum()
    assert len(traces) == 1


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("replicas", [None, 2])
def test_local_strips_the_axes(sharded, replicas):
    if len(jax.devices()) < 8:
        pytest.fail("tests run on 8 virtual CPU devices, see tests/conftest.py")
    config = dataclasses.replace(CONFIG, seq_len=191)
    plans = [make_plan(varlen_causal(n), 4, config) for n in ([100, 30, 61], [11, 150, 30])]
    spec = plans[0].spec.union(plans[1].spec)
    plans = [make_plan(varlen_causal(n), 4, config, spec) for n in ([100, 30, 61], [11, 150, 30])]
    whole = stack_plans(plans) if replicas else plans[0]
    axes = ("dp", "cp") if sharded else ("dp", None)
    mesh = jax.make_mesh((2, 4), ("dp", "cp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def body(plan):
        local = plan.local(jax.lax.axis_index("cp"))
        assert local.positions.shape == (spec.local_len,)
        assert local.local(0) is local
        meta = plan.comm[0].local(jax.lax.axis_index("cp"))
        table = plan.calc[0].local(jax.lax.axis_index("cp"), plan.cp_size)
        assert meta.send.shape == (spec.comm[0].pieces, 5)
        sums = (local.positions, meta.send, local.comm[0].send, table.slices, local.calc[0].slices)
        return jnp.stack([jnp.sum(x) for x in sums])[None, None]

    specs = P(*axes) if replicas else P(*axes[1:])
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(specs,), out_specs=P("dp", "cp"), check_vma=False
    )
    got = np.asarray(jax.jit(run)(whole)).reshape(2, 4, -1)
    for replica in range(2):
        plan = plans[replica] if replicas else plans[0]
        for rank in range(4):
            leaves = (plan.positions, *[plan.comm[0].send] * 2, *[plan.calc[0].slices] * 2)
            assert got[replica, rank].tolist() == [leaf[rank].sum() for leaf in leaves]


def test_local_refuses_wrong_axes():
    plan = make_plan(MASK, 4, CONFIG)
    with pytest.raises(ValueError, match=r"has 2 ranks on its leading axis, 1 \(sharded\) or 4"):
        jax.tree.map(lambda leaf: leaf[:2], plan).local(0)
    with pytest.raises(ValueError, match="has 2 replicas here"):
        stack_plans([plan, plan]).local(0)


def test_stack_plans():
    plan, other = make_plan(MASK, 4, CONFIG), make_plan(varlen_causal([191]), 4, CONFIG)
    stacked = stack_plans([plan, plan])
    assert stacked.planning_ms == 2 * plan.planning_ms
    assert stacked.positions.shape == (2, 4, plan.spec.local_len)
    assert stacked.spec == plan.spec
    with pytest.raises(ValueError, match=r"plan 1 and plan 0 have different specs.*spec\."):
        stack_plans([plan, other])
    with pytest.raises(ValueError, match="at least one plan"):
        stack_plans([])
    with pytest.raises(TypeError, match=r"such as \[plan\]; got a plan"):
        stack_plans(plan)
    with pytest.raises(TypeError, match="plan 1 must be an AttentionPlan, got PlanSpec"):
        stack_plans([plan, plan.spec])
    with pytest.raises(ValueError, match="stacked or local plan"):
        stacked.report()


def test_with_mask_keeps_the_dispatch():
    plan = make_plan(MASK, 4, CONFIG)
    window = masks.local(191, window=(10, 0))
    other = plan.with_mask(window)
    check_plan(other, window)
    assert other.dispatch is plan.dispatch
    assert other.rolls is plan.rolls
    assert (
        plan.with_mask(MASK, overlap=(2, 1), travelling=((50, 53),)).fingerprint()
        == plan.fingerprint()
    )
    shorter = varlen_causal([50, 20])
    check_plan(plan.with_mask(shorter, overlap=1), shorter)


def test_with_mask_in_a_given_spec():
    plan = make_plan(MASK, 4, CONFIG)
    window = masks.local(191, window=(10, 0))
    union = plan.with_mask(window, overlap=(2, 1), travelling=((50, 53),)).spec.union(plan.spec)
    padded = plan.with_mask(window, spec=union)
    assert padded.spec == union
    check_plan(padded, window)
    with pytest.raises(ValueError, match="does not fit the given spec"):
        plan.with_mask(masks.full(191), spec=union)
    with pytest.raises(ValueError, match="its cp_size is 2, the plan's is 4"):
        plan.with_mask(window, spec=make_plan(window, 2, CONFIG).spec)
    with pytest.raises(ValueError, match="mask has 192 tokens, the sequence only 191"):
        plan.with_mask(masks.causal(192))


def test_report_counts():
    plan = make_plan(masks.full(64), 4, PlanConfig(chunk_size=8, overlap=1))
    report = plan.report()
    assert report.imbalance == 1.0
    assert report.recv_rows.tolist() == report.ring_rows.tolist() == [48] * 4
    assert report.recv_bytes(2, 8, 16, "float32").tolist() == [48 * 2 * 24 * 4] * 4
    assert report.collective_rows == 4 * plan.comm[0].pair_rows
    assert report.collective_bytes(1, 4, dtype="float16") == report.collective_rows * 16
    assert report.padding == 0.0
    assert make_plan(masks.full(60), 4, PlanConfig(chunk_size=8)).report().padding == 1 - 60 / 64


def test_reports_need_values():
    plan = make_plan(MASK, 4, CONFIG)
    for name in ("report", "fingerprint"):
        with pytest.raises(ValueError, match="traced plan has none"):
            jax.jit(lambda p, name=name: getattr(p, name)())(plan)


@pytest.mark.parametrize("cp_size", [1, 4, 64])
def test_plot(tmp_path, cp_size):
    pytest.importorskip("matplotlib")
    plan = make_plan(varlen_causal([300, 140, 7]), cp_size, PlanConfig(chunk_size=4))
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_plan_that_is_on_the_devices_is_drawn_and_reported(tmp_path):
    pytest.importorskip("matplotlib")
    plan, mesh = make_plan(MASK, 4, CONFIG), jax.make_mesh((4,), ("cp",))  # explicit, as by default
    placed = jax.device_put(plan, jax.NamedSharding(mesh, jax.P("cp")))
    placed.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert placed.report(mask=MASK).imbalance == plan.report().imbalance
    assert stack_plans([placed, plan]).fingerprint() == stack_plans([plan, plan]).fingerprint()


def test_picture_shows_the_mask_and_its_owners():
    plan = make_plan(MASK, 4, CONFIG)
    owners = sampled_owners(plan, pixels=191)
    np.testing.assert_array_equal(owners >= 0, MASK.dense())
    for rank, held in enumerate(plan.positions):
        rows = np.setdiff1d(held[held >= 0], np.arange(50, 53))
        assert set(np.unique(owners[rows])) <= {-1, rank}
    for row in range(50, 53):  # these travel: the owner of a key computes
        seen = np.flatnonzero(owners[row] >= 0)
        owner_of_key = [np.flatnonzero((plan.positions == key).any(axis=1))[0] for key in seen]
        assert owners[row, seen].tolist() == owner_of_key


def test_picture_shows_late_queries():
    plan = make_plan(MASK, 4, dataclasses.replace(CONFIG, overlap="late", travelling="never"))
    assert plan.late is not None
    owner = np.empty(191, np.int64)
    for rank, held in enumerate(plan.positions):
        owner[held[held >= 0]] = rank
    expected = np.where(MASK.dense(), owner[:, None], -1)
    np.testing.assert_array_equal(sampled_owners(plan, pixels=191), expected)


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (64, 64), (130, 67), (5, 300)])
def test_slice_table_of_one_device(q_len, k_len):
    mask = masks.causal(q_len, k_len, offset=k_len - q_len)
    table = slice_table(mask)
    assert (table.q_len, table.k_len, table.tile_size) == (q_len, k_len, 128)
    assert table.slices.shape[1] == 6
    assert {leaf.dtype for leaf in jax.tree.leaves(table)} == {np.dtype(np.int32)}
    with pytest.raises(ValueError, match=r"q_len is \d+, but \d+ is needed"):
        slice_table(masks.full(q_len + 1, k_len), spec=table.spec)
    with pytest.raises(TypeError, match=r"spec must be a TableSpec, .* got PlanSpec"):
        slice_table(mask, spec=make_plan(masks.causal(8), 1).spec)


def test_tables_have_their_spec_alone_and_in_a_plan():
    table = slice_table(MASK)
    assert slice_table(MASK, spec=table.spec).spec == table.spec
    wide = table.spec.scaled(1.5)
    assert wide.covers(table.spec)
    assert slice_table(MASK, spec=wide).spec == wide
    plan = make_plan(MASK, 4)
    assert tuple(each.spec for each in plan.calc) == plan.spec.calc
    with pytest.raises(ValueError, match=r"scaled by a factor of at least 1, got 0\.5"):
        table.spec.scaled(0.5)
