"""Models with Flax's attention modules, and our decoder, train as they do under dense attention."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.flax import Decoder, DecoderConfig, attention_fn

SEQ_LEN, BATCH, CP, VOCABULARY, STEPS = 88, 2, 4, 13, 3
CONFIG = mj.PlanConfig(chunk_size=8, overlap=1)
OVER_DP = mj.DistOptions(batch_axes="dp")


class NnxModel(nnx.Module):
    """A model of one's own around nnx.MultiHeadAttention."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, 16, decode=False, rngs=rngs)
        self.head = nnx.Linear(16, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, mask=None):
        x = self.embed(tokens)
        return self.head(x + self.attention(x, mask=mask))


class LinenLayer(linen.Module):
    """A layer around linen's module. Of the plan, which a scan hands on as it is, it makes its attention."""

    @linen.compact
    def __call__(self, x, mask, plan):
        attend = linen.dot_product_attention if plan is None else _attend(plan)
        attention = linen.MultiHeadDotProductAttention(2, attention_fn=attend)
        return x + attention(x, mask=mask), None


class LinenModel(linen.Module):
    """A model of two such layers, rematerialised and scanned over."""

    @linen.compact
    def __call__(self, tokens, mask=None, plan=None):
        layers = linen.scan(
            linen.remat(LinenLayer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=linen.broadcast,
            length=2,
        )
        x, _ = layers()(linen.Embed(VOCABULARY, 16)(tokens), mask, plan)
        return linen.Dense(VOCABULARY)(x)


def _attend(plan):
    return attention_fn(plan, options=OVER_DP)


def _nnx():
    graphdef, params = nnx.split(NnxModel(nnx.Rngs(0)), nnx.Param)

    def apply(params, tokens, mask=None, plan=None):
        model = nnx.merge(graphdef, params)
        if plan is not None:
            model.attention.set_attributes(attention_fn=_attend(plan))
        return model(tokens, mask)

    return params, apply


def _linen():
    model = LinenModel()
    return model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)), model.apply


def _batches(rng):
    """Batches of tokens and labels with another mask each, and all masks planned in one spec.

    The first batch comes once more at the end, where its loss shows what was learned.
    """
    masks, batches = [], []
    for _ in range(STEPS):
        cuts = np.sort(rng.choice(np.arange(1, SEQ_LEN), 4, replace=False))
        lengths = np.diff([0, *cuts, SEQ_LEN])
        masks.append(mj.masks.varlen(lengths, causal=True, window=(20, 0)))
        batches.append(rng.integers(0, VOCABULARY, (2, BATCH, SEQ_LEN)).astype(np.int32))
    specs = [mj.make_plan(mask, CP, CONFIG).spec for mask in masks]
    spec = specs[0].union(*specs[1:])
    plans = [mj.make_plan(mask, CP, CONFIG, spec) for mask in masks]
    return tuple([*each, each[0]] for each in (batches, masks, plans))


def _train(params, loss_of, inputs):
    """Losses of a few Adam steps; the step is traced once."""
    optimizer = optax.adam(1e-2)
    state, losses, traces = optimizer.init(params), [], []

    @jax.jit
    def step(params, state, *batch):
        traces.append(None)
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in inputs:
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    assert len(traces) == 1
    return losses


def _train_over_mesh(params, loss_of, batches, plans):
    """The same with the batches dispatched over a mesh (dp, cp), and plans for masks."""
    mesh = jax.make_mesh((2, CP), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        rows, everywhere = NamedSharding(mesh, P("dp", "cp")), NamedSharding(mesh, P())
        inputs = [
            (*jax.device_put(mj.dispatch(tuple(b), p, axis=1), rows), p)
            for b, p in zip(batches, plans, strict=True)
        ]
        return _train(jax.device_put(params, everywhere), loss_of, inputs)


def _loss(logits, labels, weight):
    return (
        optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weight
    ).sum() / weight.sum()


@pytest.mark.parametrize("make", [_nnx, _linen])
def test_own_model_trains_to_the_same_losses(make, rng):
    params, apply = make()
    batches, masks, plans = _batches(rng)

    def dense_loss(params, tokens, labels, mask):
        return _loss(apply(params, tokens, mask), labels, jnp.ones(labels.shape))

    dense = _train(
        params, dense_loss, [(*b, m.dense()) for b, m in zip(batches, masks, strict=True)]
    )

    def planned_loss(params, tokens, labels, plan):
        weight = jnp.broadcast_to(plan.positions.reshape(-1) >= 0, labels.shape)
        return _loss(apply(params, tokens, plan=plan), labels, weight)

    ours = _train_over_mesh(params, planned_loss, batches, plans)
    np.testing.assert_allclose(ours, dense, rtol=2e-5)
    assert dense[-1] < dense[0] - 1e-2


def test_decoder_with_rotations_by_plan_positions_and_sinks(rng):
    """Against attention whose sinks are one more key without a value."""
    sizes = {"features": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "hidden": 24}
    config = DecoderConfig(VOCABULARY, num_layers=1, sinks=True, **sizes)
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)
    batches, masks, plans = _batches(rng)

    def dense_attention(mask):
        def attend(q, k, v, sinks):
            k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
            logits = jnp.einsum("bqnh,bknh->bnqk", q, k) / np.sqrt(q.shape[-1])
            logits = jnp.where(mask, logits, -jnp.inf)
            sink = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
            weights = jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1))[..., :-1]
            return jnp.einsum("bnqk,bknh->bqnh", weights, v)

        return attend

    def loss_of(params, tokens, labels, attends, positions):
        positions = jnp.broadcast_to(positions, tokens.shape)
        logits = nnx.merge(graphdef, params)(tokens, positions, attends)
        return _loss(logits, labels, positions >= 0)

    def dense_loss(params, tokens, labels, mask):
        return loss_of(params, tokens, labels, (dense_attention(mask),), jnp.arange(SEQ_LEN))

    def planned_loss(params, tokens, labels, plan):
        attends = (attention_fn(plan, options=OVER_DP),)
        return loss_of(params, tokens, labels, attends, plan.positions.reshape(-1))

    dense = _train(
        params, dense_loss, [(*b, m.dense()) for b, m in zip(batches, masks, strict=True)]
    )
    ours = _train_over_mesh(params, planned_loss, batches, plans)
    np.testing.assert_allclose(ours, dense, rtol=3e-5)
