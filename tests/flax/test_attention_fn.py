"""Flax's own attention modules give with our ``attention_fn`` what they give with a dense mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj

LENGTHS = [37, 1, 58]
T = sum(LENGTHS)
MASK = mj.masks.varlen(LENGTHS, causal=True, window=(20, 0))
PLAN = mj.make_plan(MASK, cp_size=4, config=mj.PlanConfig(chunk_size=8))
SIZES = {"num_heads": 4, "in_features": 32, "qkv_features": 32, "decode": False}
OVER_DP = mj.DistOptions(batch_axes="dp")
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture
def inputs(rng):
    return rng.normal(size=(2, T, 32)).astype(np.float32)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_nnx_module_with_a_mask(inputs, num_kv_heads):
    make = functools.partial(nnx.MultiHeadAttention, **SIZES, num_kv_heads=num_kv_heads)
    ours = make(rngs=nnx.Rngs(0), attention_fn=mj.flax.attention_fn(MASK))
    dense = make(rngs=nnx.Rngs(0))
    expected = dense(inputs, mask=MASK.dense())
    np.testing.assert_allclose(ours(inputs), expected, **TOLERANCE)
    if num_kv_heads == 2:
        ours.set_attributes(attention_fn=mj.flax.attention_fn(mj.slice_table(MASK)))
        np.testing.assert_allclose(ours(inputs), expected, **TOLERANCE)


def test_nnx_module_with_a_plan_that_is_an_argument(inputs):
    mesh = jax.make_mesh((2, 4), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    module = nnx.MultiHeadAttention(**SIZES, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(module)

    @jax.jit
    def apply(params, x, plan):
        module = nnx.merge(graphdef, params)
        module.set_attributes(attention_fn=mj.flax.attention_fn(plan, options=OVER_DP))
        return module(x)

    x = mj.dispatch(inputs, PLAN, axis=1)
    with jax.set_mesh(mesh):
        out = apply(params, jax.device_put(x, NamedSharding(mesh, P("dp", "cp"))), PLAN)
    expected = module(inputs, mask=MASK.dense())
    np.testing.assert_allclose(mj.undispatch(np.asarray(out), PLAN, axis=1), expected, **TOLERANCE)


def test_linen_module(inputs):
    make = functools.partial(linen.MultiHeadDotProductAttention, num_heads=4)
    ours, dense = make(attention_fn=mj.flax.attention_fn(MASK)), make()
    params = dense.init(jax.random.key(0), inputs)
    expected = dense.apply(params, inputs, mask=MASK.dense())
    np.testing.assert_allclose(ours.apply(params, inputs), expected, **TOLERANCE)


def test_a_module_with_dropout_is_served_where_it_drops_nothing(inputs):
    """As in evaluation."""
    ours = nnx.MultiHeadAttention(
        **SIZES, dropout_rate=0.5, rngs=nnx.Rngs(0), attention_fn=mj.flax.attention_fn(MASK)
    )
    dense = nnx.MultiHeadAttention(**SIZES, rngs=nnx.Rngs(0))
    expected = dense(inputs, mask=MASK.dense())
    np.testing.assert_allclose(ours(inputs, deterministic=True), expected, **TOLERANCE)


def test_dtype_of_the_module_is_honoured(inputs):
    module = nnx.MultiHeadAttention(
        **SIZES, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), attention_fn=mj.flax.attention_fn(MASK)
    )
    assert module(inputs).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"mask": np.ones((T, T), bool)}, "mask: the mask is the plan's"),
        ({"bias": np.zeros((T, T))}, "bias: a dense bias would need"),
        ({"is_causal": True}, "is_causal=True"),
        ({"dropout_rate": 0.1, "deterministic": False}, r"dropout_rate=0\.1"),
        ({"module": object()}, "sow_weights"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "einsum"),
    ],
)
def test_what_it_cannot_do_is_refused(asked, match):
    q = jnp.ones((T, 4, 8))
    with pytest.raises(NotImplementedError, match=match):
        mj.flax.attention_fn(MASK)(q, q, q, **asked)


@pytest.mark.parametrize(
    ("plan", "arguments", "match"),
    [
        (
            MASK.dense(),
            {},
            "plan must be an AttentionPlan, an AttnMask or a SliceTable, got ndarray",
        ),
        (MASK, {"options": OVER_DP}, "flex_flash_attention, which takes no options$"),
        (PLAN, {"batch_axes": "dp"}, r"takes no batch_axes; .* options=DistOptions\(...\)"),
    ],
)
def test_what_it_is_not_for_is_refused_at_once(plan, arguments, match):
    with pytest.raises(TypeError, match=match):
        mj.flax.attention_fn(plan, **arguments)


def test_the_dtype_that_a_module_asks_for_is_that_of_attention():
    q = jnp.ones((T, 4, 8))
    assert mj.flax.attention_fn(MASK)(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert mj.flax.attention_fn(MASK)(q, q, q, dtype=None).dtype == jnp.float32


def test_linen_asks_and_is_refused(inputs):
    module = linen.MultiHeadDotProductAttention(
        num_heads=4, dropout_rate=0.5, deterministic=False, attention_fn=mj.flax.attention_fn(MASK)
    )
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, inputs)


def test_mask_of_a_linen_call_is_not_lost_in_silence(inputs):
    """Linen passes on only what the signature names; ours names the mask and refuses it."""
    module = linen.MultiHeadDotProductAttention(
        num_heads=4, attention_fn=mj.flax.attention_fn(MASK)
    )
    with pytest.raises(NotImplementedError, match="mask: the mask is the plan's"):
        module.init(jax.random.key(0), inputs, mask=MASK.dense())
