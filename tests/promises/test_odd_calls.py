"""Calls at the edge of what is legal: right or refused by name, on one device and over several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.plan import PlanConfig

CP = 2
MASK = mj.masks.varlen([30, 34, 64], causal=True)
HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((CP,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:CP])


@pytest.fixture(scope="module")
def plan():
    return mj.make_plan(MASK, CP, PlanConfig(chunk_size=8))


def operands(rng, *lead):
    shapes = [(*lead, MASK.q_len, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def on_one_device(q, k, v, **options):
    return mj.flex_flash_attention(q, k, v, MASK, **options)


@pytest.fixture(params=["one device", "several"])
def attend(request, mesh, plan):
    if request.param == "one device":
        return on_one_device

    def over_several(q, k, v, **options):
        return mj.dist_attention(q, k, v, plan, mesh=mesh, **options)

    return over_several


def test_a_batch_without_a_sequence(attend, rng):
    q, k, v = operands(rng, 0)
    sinks = jnp.ones(HEADS)

    def loss(q, k, v, sinks):
        out, max_logits = attend(q, k, v, sinks=sinks, return_max_logits=True)
        assert out.shape == q.shape
        return out.sum(), max_logits

    grads, max_logits = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, sinks)
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v, sinks)]
    assert not np.any(grads[3])
    np.testing.assert_array_equal(max_logits, np.full(HEADS, -np.inf))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scale": 1e39}, "scale must fit in float32"),
        ({"scale": -1e39}, "scale must fit in float32"),
        ({"logits_soft_cap": 1e39}, "logits_soft_cap must fit in float32"),
        ({"logits_soft_cap": 1e-46}, "logits_soft_cap must fit in float32"),
        ({"sinks": np.arange(HEADS)}, "sinks must be floating"),
    ],
)
def test_options_that_kernels_would_read_as_others(attend, rng, options, match):
    with pytest.raises(ValueError, match=match):
        attend(*operands(rng), **options)


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_options_that_are_no_numbers_are_refused_by_name(attend, rng, name):
    with pytest.raises(TypeError, match=f"{name} must be a number, or None; got 'auto'"):
        attend(*operands(rng), **{name: "auto"})


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_traced_options_are_refused_by_name(attend, rng, name):
    q, k, v = operands(rng)
    with pytest.raises(TypeError, match=rf"{name} becomes part of the program.*float32"):
        jax.jit(lambda x: attend(q, k, v, **{name: x}))(2.0)
    attend(q, k, v, **{name: np.float64(2)})


def test_a_cap_of_none_is_said_in_one_way(attend, rng):
    with pytest.raises(ValueError, match=r"logits_soft_cap must be positive, or None.*got 0\.0"):
        attend(*operands(rng), logits_soft_cap=0)


def test_64_bit_types_change_nothing(attend, rng):
    with jax.enable_x64(True):
        for batch in ((), (0,)):
            q, k, v = operands(rng, *batch)
            results = attend(
                q, k, v, sinks=np.zeros(HEADS), return_residual=True, return_max_logits=True
            )
            assert [x.dtype for x in results] == ["float32"] * 3


def test_tables_made_on_the_device_with_64_bit_types(rng):
    q, k, v = operands(rng)
    blocks = rng.random((2, 2)) < 0.7

    @jax.jit
    def run(blocks):
        return mj.flex_flash_attention(q, k, v, mj.block_sparse_table(blocks, 64, 128))

    expected = run(blocks)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(run(blocks), expected)


def test_forward_mode_is_refused(attend, rng):
    q, k, v = operands(rng)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attend(q, k, v), (q,), (q,))


def test_donated_queries(attend, rng):
    arrays = operands(rng)
    expected = attend(*arrays)
    donating = jax.jit(lambda q, k, v: attend(q, k, v), donate_argnums=0)
    got = donating(arrays[0] + 0, *arrays[1:])
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_one_array_as_queries_keys_and_values(attend, rng):
    _, x, _ = operands(rng)
    different = [x + 0 for _ in range(3)]
    np.testing.assert_array_equal(attend(x, x, x), attend(*different))


def test_a_plan_whose_arrays_are_donated(mesh, plan, rng):
    q, k, v = operands(rng)
    there = jax.device_put(jax.tree.map(np.array, plan), NamedSharding(mesh, P("cp")))
    expected = mj.dist_attention(q, k, v, there, mesh=mesh)

    def step(plan, q):
        return plan, mj.dist_attention(q, k, v, plan, mesh=mesh)

    kept, out = jax.jit(step, donate_argnums=0)(there, q)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert jax.tree.map(np.array, kept).fingerprint() == plan.fingerprint()


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.ones((0, 1, 16, 16), bool)},
        {"mask": np.ones((1, 1, 16, 16), bool)},
        {"query_seq_lengths": np.zeros(0, np.int32), "mask": np.ones((1, 1, 16, 16), bool)},
    ],
)
def test_masks_of_a_batch_without_a_sequence(options):
    x = jnp.zeros((0, 16, HEADS, DIM))
    assert mj.dot_product_attention(x, x, x, **options).shape == x.shape


def test_tokens_of_every_dtype_come_back(mesh, plan, rng):
    dtypes = ("float8_e4m3fn", "int4", "bool", "complex64")
    x = {dtype: jnp.asarray(rng.integers(0, 2, (MASK.q_len, 3)), dtype) for dtype in dtypes}
    back = mj.undispatch(mj.dispatch(x, plan, mesh=mesh), plan, mesh=mesh)
    for dtype in dtypes:
        assert back[dtype].dtype == dtype
        np.testing.assert_array_equal(back[dtype], x[dtype])


def test_second_derivatives_are_those_of_the_reference_alone(rng):
    q, k, v = (jnp.asarray(rng.normal(size=(6, 1, 4)), jnp.float32) for _ in range(3))
    step = 1e-2

    def slope(q, implementation="reference"):
        def loss(q):
            out = mj.flex_flash_attention(
                q, k, v, mj.masks.causal(6), implementation=implementation
            )
            return (out**2).sum()

        return (jax.grad(loss)(q) ** 2).sum()

    # Along the gradient, where nothing cancels: differences in float32 tell little of a small sum.
    gradient = jax.jit(jax.grad(slope))(q)
    along = jnp.linalg.norm(gradient)
    direction = gradient / along
    ends = jax.jit(jax.vmap(slope))(jnp.stack([q + step * direction, q - step * direction]))
    np.testing.assert_allclose(along, (ends[0] - ends[1]) / (2 * step), rtol=0.02, atol=1e-3)
    with pytest.raises(ValueError, match="magi_jax_ffa_backward"):
        jax.grad(lambda q: slope(q, "cpu"))(q)


def test_arrays_of_a_cpu_are_computed_there_where_there_are_gpus(attend, rng, monkeypatch):
    q, k, v = operands(rng)
    expected = attend(q, k, v)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_array_equal(attend(q, k, v), expected)
    monkeypatch.undo()
    with jax.default_device(jax.devices("cpu")[0]):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        traced = jax.jit(lambda q, k, v: attend(q, k, v))(q, k, v)
    np.testing.assert_allclose(traced, expected, rtol=1e-5, atol=1e-6)
