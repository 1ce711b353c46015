"""The layers of `magi_jax.flax`: rotary embedding against complex numbers, a decoder in any layout."""

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.flax import Attention, Decoder, DecoderConfig, attention_fn, rotate

LENGTHS = [50, 3, 71]
T = sum(LENGTHS)
OVER_DP = mj.DistOptions(batch_axes="dp")
CONFIG = DecoderConfig(
    vocab_size=17, num_layers=2, features=32, num_heads=4, num_kv_heads=2, head_dim=8, hidden=48
)


def test_rotate_multiplies_by_a_complex_phase(rng):
    x = rng.normal(size=(2, T, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 5000, (2, T))
    numbers = x[..., :4].astype(np.complex128) + 1j * x[..., 4:]
    angles = positions[..., None, None] * 500.0 ** (-np.arange(4) / 4)
    numbers = numbers * np.exp(1j * angles)
    expected = np.concatenate([numbers.real, numbers.imag], axis=-1)
    # float32 angles of up to 5,000 are known to some 2e-4.
    np.testing.assert_allclose(rotate(x, positions, theta=500.0), expected, atol=3e-3)


def test_rotate_keeps_scores_when_positions_shift(rng):
    q, k = rng.normal(size=(2, T, 2, 8)).astype(np.float32)

    def scores(shift):
        positions = jnp.arange(T) + shift
        return jnp.einsum("qnh,knh->nqk", rotate(q, positions), rotate(k, positions))

    np.testing.assert_allclose(scores(0), scores(300), atol=1e-3)


def test_attention_turns_queries_and_keys_at_its_own_frequencies(rng):
    """Where one of them turned at others, shifted positions would give other scores."""
    x = rng.normal(size=(40, 16)).astype(np.float32)
    places, mask = jnp.arange(40), attention_fn(mj.masks.causal(40))
    layer, usual = (
        Attention(16, 2, 1, 8, theta=theta, rngs=nnx.Rngs(0)) for theta in (50.0, 10_000.0)
    )
    out = layer(x, places, mask)
    np.testing.assert_allclose(out, layer(x, places + 9, mask), atol=1e-4)
    assert not np.allclose(out, usual(x, places, mask), atol=1e-3)


def test_rotate_finds_angles_in_float32_whatever_is_turned(rng):
    """In bfloat16 neighbours at position 5,000 would have one angle."""
    x = jnp.asarray(rng.normal(size=(T, 2, 8)), jnp.bfloat16)
    positions = 5000 + jnp.arange(T)
    turned = rotate(x, positions)
    assert turned.dtype == jnp.bfloat16
    wanted = rotate(x.astype(jnp.float32), positions)
    np.testing.assert_allclose(turned.astype(jnp.float32), wanted, rtol=1e-2, atol=1e-2)


def test_rotate_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"x\.shape=\(4, 2, 7\)"):
        rotate(jnp.ones((4, 2, 7)), jnp.arange(4))
    with pytest.raises(ValueError, match=r"positions\.shape=\(5,\)"):
        rotate(jnp.ones((4, 2, 8)), jnp.arange(5))


def test_attention_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        Attention(32, 4, 3, 8, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_decoder_gives_the_same_dispatched_as_on_one_device(kind, rng):
    full = mj.masks.varlen(LENGTHS, causal=True)
    window = mj.masks.varlen(LENGTHS, causal=True, window=(9, 0))
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    tokens = rng.integers(0, 17, (2, T)).astype(np.int32)
    positions = np.tile(np.concatenate([np.arange(n) for n in LENGTHS]), (2, 1)).astype(np.int32)
    alone = model(tokens, positions, (attention_fn(full), attention_fn(window)))

    plan = mj.make_plan(full, cp_size=4, config=mj.PlanConfig(chunk_size=8))
    plans = (plan, plan.with_mask(window))
    mesh = jax.make_mesh((2, 4), ("dp", "cp"), axis_types=(kind,) * 2)

    @jax.jit
    def apply(params, tokens, positions, plans):
        attends = tuple(attention_fn(plan, options=OVER_DP) for plan in plans)
        return nnx.merge(graphdef, params)(tokens, positions, attends)

    moved = mj.dispatch((tokens, positions), plan, axis=1)
    with jax.set_mesh(mesh):
        moved = jax.device_put(moved, NamedSharding(mesh, P("dp", "cp")))
        out = apply(params, *moved, plans)
    out = mj.undispatch(np.asarray(out), plan, axis=1)
    np.testing.assert_allclose(out, alone, rtol=1e-4, atol=1e-5)


def test_decoder_does_not_look_into_other_documents(rng):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    attends = (attention_fn(mj.masks.varlen(LENGTHS, causal=True)),)
    positions = jnp.concatenate([jnp.arange(n) for n in LENGTHS])
    tokens = rng.integers(0, 17, T)
    changed = tokens.copy()
    changed[60] = (changed[60] + 1) % 17  # in the last document
    before = model(tokens, positions, attends[0])  # one for all blocks
    after = model(changed, positions, attends)
    np.testing.assert_array_equal(before[:60], after[:60])
    assert not np.allclose(before[60:], after[60:])


def test_blocks_take_the_attentions_in_turn():
    model = Decoder(dataclasses.replace(CONFIG, num_layers=5), rngs=nnx.Rngs(0))
    called = []

    def attend_as(name):
        return lambda query, key, value: (called.append(name), query)[1]

    model(jnp.zeros(3, jnp.int32), jnp.arange(3), tuple(map(attend_as, "ab")))
    assert called == list("ababa")


@pytest.mark.parametrize(
    ("attends", "error", "match"),
    [
        (
            mj.masks.causal(3),
            TypeError,
            r"attends must be a function .*attention_fn.* got AttnMask",
        ),
        ([lambda q, k, v: q, None], TypeError, "or a sequence of them; got NoneType"),
        ([], ValueError, "attends is empty"),
    ],
)
def test_attentions_that_are_none_are_refused(attends, error, match):
    with pytest.raises(error, match=match):
        Decoder(CONFIG, rngs=nnx.Rngs(0))(jnp.zeros(3, jnp.int32), jnp.arange(3), attends)


def test_sizes_that_make_no_decoder_are_refused():
    with pytest.raises(ValueError, match="features must be at least 1, got 0"):
        dataclasses.replace(CONFIG, features=0)
    with pytest.raises(ValueError, match="even head_dim, got 7"):
        dataclasses.replace(CONFIG, head_dim=7)


def test_all_activations_have_the_sharding_and_dtype_of_the_config():
    seen = []

    class Recording(DecoderConfig):
        def keep(self, x):
            seen.append(x.dtype)
            return x

    model = Decoder(Recording(**vars(CONFIG) | {"dtype": jnp.bfloat16}), rngs=nnx.Rngs(0))
    logits = model(jnp.zeros(3, jnp.int32), jnp.arange(3), attention_fn(mj.masks.causal(3)))
    # The rows of the tokens; in each block what attention and MLP read, and the sums with what they give.
    assert seen == [jnp.bfloat16] * (1 + 4 * CONFIG.num_layers)
    assert logits.dtype == jnp.float32


def test_gradients_of_a_token_s_many_places_are_summed_in_float32(rng):
    """In bfloat16 the sum of thousands of rows would depend on their order, and so on the dispatch."""
    config = dataclasses.replace(CONFIG, num_layers=0, dtype=jnp.bfloat16)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    tokens = jnp.zeros(8192, jnp.int32)
    weights = rng.uniform(size=(8192, config.vocab_size)).astype(np.float32)

    @jax.jit
    def embedding_grad(params, weights):
        def loss(params):
            logits = nnx.merge(graphdef, params)(tokens, tokens, lambda q, k, v: q)
            return (jax.nn.log_softmax(logits) * weights).sum()

        return jax.grad(loss)(params)["embed"]["embedding"][...][0]

    found = embedding_grad(params, weights)
    again = embedding_grad(params, weights[np.argsort(weights[:, 0])])
    np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-4 * np.abs(found).max())


def test_flax_that_is_not_installed_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("magi_jax.flax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "magi_jax\[flax\]"'):
        importlib.import_module("magi_jax.flax")
