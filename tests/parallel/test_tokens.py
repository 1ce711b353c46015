"""`dispatch`, `undispatch`, `roll` and `positions` in all three forms, on uneven lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import make_mesh, shared_plans
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import dispatch, positions, roll, undispatch
from magi_jax.plan import PlanConfig, make_plan, stack_plans

SHIFTS = (-1, 2, 30)


def plan_of(seq_len, cp_size, chunk=4):
    config = PlanConfig(chunk_size=chunk, roll_shifts=SHIFTS, dispatch="lpt")
    return make_plan(masks.causal(seq_len), cp_size, config)


def leaves(rng, *lead):
    """Arrays of several dtypes and ranks, no value of which is zero."""
    floats = rng.normal(size=(*lead, 3)).astype(np.float32)
    return {
        "ids": rng.integers(1, 100, size=lead).astype(np.int32),
        "x": floats,
        "half": jnp.asarray(floats, jnp.bfloat16),
        "seen": np.ones(lead, bool),
    }


def host(x):
    return jax.tree.map(np.asarray, x)


def shifted(x, shift):
    """``x`` along axis 0, zeros where a roll would wrap."""
    rows = np.arange(len(x)) - shift
    inside = (rows >= 0) & (rows < len(x))
    return np.where(inside.reshape(-1, *[1] * (x.ndim - 1)), np.roll(x, shift, axis=0), 0).astype(
        x.dtype
    )


def assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(("seq_len", "cp_size"), [(1, 4), (17, 4), (48, 4), (53, 8), (7, 1)])
def test_in_a_data_loader(seq_len, cp_size, rng):
    plan = plan_of(seq_len, cp_size)
    x = host(leaves(rng, seq_len))
    moved = dispatch(x, plan)
    where = positions(plan)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(moved))
    for name, leaf in moved.items():
        assert leaf.shape == (cp_size * plan.spec.local_len, *x[name].shape[1:])
        np.testing.assert_array_equal(leaf[where >= 0], x[name][where[where >= 0]])
        assert not leaf[where < 0].any()
    np.testing.assert_array_equal(np.sort(where[where >= 0]), np.arange(seq_len))
    assert_equal(undispatch(moved, plan), x)
    for shift in (-1, 2, 30, 0, 1000):
        rolled = jax.tree.map(lambda leaf, s=shift: shifted(leaf, s), x)
        assert_equal(roll(moved, plan, shift), dispatch(rolled, plan))


@pytest.mark.parametrize(
    ("kind", "seq_len", "cp_size"),
    [
        (AxisType.Auto, 53, 4),
        (AxisType.Auto, 7, 1),
        (AxisType.Explicit, 53, 8),
        (AxisType.Explicit, 48, 4),
    ],
)
def test_whole_device_arrays(kind, seq_len, cp_size, rng):
    plan = plan_of(seq_len, cp_size)
    x = leaves(rng, seq_len)
    moved = dispatch(host(x), plan)

    @jax.jit
    def run(x, plan):
        moved = dispatch(x, plan)
        rolled = {shift: roll(moved, plan, shift) for shift in SHIFTS}
        return moved, undispatch(moved, plan), rolled, positions(plan)

    with jax.set_mesh(make_mesh(kind, cp=cp_size)):
        got, back, rolled, where = run(x, plan)
    assert_equal(got, moved)
    assert_equal(back, x)
    np.testing.assert_array_equal(where, positions(plan))
    for shift in SHIFTS:
        assert_equal(rolled[shift], roll(moved, plan, shift))
    if cp_size > 1:
        assert got["x"].sharding.spec[0] == "cp"


def test_local_rows_inside_a_shard_map(rng):
    plan = plan_of(53, 4)
    x = leaves(rng, 53)
    share = plan.dispatch.transfer.src_rows
    assert share == 14
    padded = jax.tree.map(lambda a: np.pad(a, [(0, 3)] + [(0, 0)] * (a.ndim - 1)), host(x))

    @functools.partial(
        jax.shard_map, mesh=make_mesh(cp=4), in_specs=(P("cp"), P("cp")), out_specs=P("cp")
    )
    def run(x, plan):
        moved = dispatch(x, plan)
        return moved, undispatch(moved, plan), roll(moved, plan, -1), positions(plan)

    got, back, rolled, where = jax.jit(run)(padded, plan)
    moved = dispatch(host(x), plan)
    assert_equal(got, moved)
    assert_equal(back, padded)
    assert_equal(rolled, roll(moved, plan, -1))
    np.testing.assert_array_equal(where, positions(plan))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gradients_are_the_moves_back(kind, rng):
    plan = plan_of(53, 4)
    mesh = make_mesh(kind, cp=4)
    x = {"x": rng.normal(size=(53, 3)).astype(np.float32), "ids": np.arange(53)}
    weight = rng.normal(size=(4 * plan.spec.local_len, 3)).astype(np.float32)

    @jax.jit
    def run(x, plan):
        def loss(values, move):
            moved = move(dispatch({**x, "x": values}, plan))
            return (moved["x"] * weight).sum()

        there = jax.grad(loss)(x["x"], lambda moved: moved)
        rolled = jax.grad(loss)(x["x"], lambda moved: roll(moved, plan, 2))
        moved = dispatch(x["x"], plan)
        back = jax.grad(lambda y: (undispatch(y, plan) * x["x"]).sum())(moved)
        return there, rolled, back

    with jax.set_mesh(mesh):
        there, rolled, back = run(x, plan)
    wanted = undispatch(weight, plan)
    np.testing.assert_array_equal(there, wanted)
    np.testing.assert_array_equal(rolled, shifted(wanted, -2))
    np.testing.assert_array_equal(back, dispatch(x["x"], plan))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_stacked_plans_on_two_axes(kind, rng):
    config = PlanConfig(chunk_size=4, overlap=1, roll_shifts=SHIFTS)
    lengths = [[30, 23], [1, 50, 2], [53], [5] * 10 + [3]]
    plan = stack_plans(shared_plans([masks.varlen(n, causal=True) for n in lengths], 4, config))
    x = host(leaves(rng, 4, 53))
    moved = dispatch(x, plan)
    assert moved["x"].shape == (4, 4 * plan.spec.local_len, 3)
    assert_equal(undispatch(moved, plan), x)
    mesh = make_mesh(kind, dp=2, cp=4)
    placed = jax.device_put(x, NamedSharding(mesh, P("dp")))

    @jax.jit
    def run(x, plan):
        moved = dispatch(x, plan, spec=P("dp"))
        return moved, undispatch(moved, plan, spec=P("dp")), roll(moved, plan, -1, spec=P("dp"))

    with jax.set_mesh(mesh):
        got, back, rolled = run(placed, plan)
    assert_equal(got, moved)
    assert_equal(back, x)
    assert_equal(rolled, jax.tree.map(np.asarray, roll(moved, plan, -1)))


def test_sequence_on_another_axis(rng):
    plan = plan_of(53, 4)
    x = rng.normal(size=(2, 53, 3)).astype(np.float32)
    mesh = make_mesh(dp=2, cp=4)
    wanted = np.stack([dispatch(row, plan) for row in x])
    np.testing.assert_array_equal(dispatch(x, plan, axis=1), wanted)
    placed = jax.device_put(x, NamedSharding(mesh, P("dp")))
    got = dispatch(placed, plan, axis=1, mesh=mesh)  # not traced: the sharding is known
    np.testing.assert_array_equal(got, wanted)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "cp")), 3)


@pytest.mark.parametrize("shift", [2**31, -(2**31), 2**40])
def test_a_shift_beyond_32_bits_brings_zeros_in_a_data_loader(shift):
    plan = plan_of(53, 4)
    moved = dispatch(np.ones(53, np.float32), plan)
    assert not roll(moved, plan, shift).any()


def test_refusals(rng):
    plan = plan_of(53, 4)
    x, mesh = np.zeros((53, 2), np.float32), make_mesh(dp=2, cp=4)
    device = jnp.asarray(x)
    rows = 4 * plan.spec.local_len
    with pytest.raises(ValueError, match=r"needs 53 rows on axis 0, got .*; say axis=1 if tokens"):
        dispatch(np.zeros((2, 53)), plan)
    with pytest.raises(ValueError, match=r"dispatch needs 53 rows on axis 0, got shape \(52, 2\)$"):
        dispatch(x[1:], plan)
    with pytest.raises(ValueError, match=f"undispatch needs {rows} rows on axis 0 of the whole"):
        undispatch(device, plan, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"a roll by 5; it has \(-1, 2, 30\).*PlanConfig.roll_shifts"
    ):
        roll(jnp.zeros(rows), plan, 5, mesh=mesh)
    with pytest.raises(ValueError, match=r"dispatch finds no mesh.*jax.set_mesh"):
        dispatch(device, plan)
    with pytest.raises(ValueError, match="axis_name='sp', which is no axis of the mesh"):
        dispatch(device, plan, "sp", mesh=mesh)
    with pytest.raises(ValueError, match="the plan is for 4 ranks, but mesh axis 'dp' has 2"):
        dispatch(device, plan, "dp", mesh=mesh)
    with pytest.raises(
        ValueError, match=r"automatic mesh axes \['dp'\] is not known here: pass spec="
    ):
        jax.jit(lambda x: dispatch(x, plan, mesh=mesh))(device)
    with pytest.raises(ValueError, match="spec names 'tp'"):
        dispatch(device, plan, mesh=mesh, spec=P(None, "tp"))
    with pytest.raises(ValueError, match=r"stacked plan has 2 replicas here, .* has 3"):
        dispatch(jnp.zeros((3, 53)), stack_plans([plan, plan]), mesh=mesh, spec=P())
