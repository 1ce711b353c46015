"""Train steps over dp x fsdp x tp x cp: right gradients, and nothing on the wires but what is meant."""

import math
import operator

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.testing import hlo

SEQ_LEN, BATCH = 90, 2
SIZES = {"dp": 1, "fsdp": 2, "tp": 2, "cp": 2}
CONFIG = mj.PlanConfig(chunk_size=8, overlap=1, roll_shifts=())
OVER_AUTOMATIC_AXES = mj.DistOptions(batch_axes=model.BATCH_AXES, head_axes="tp")


def _mesh(kind):
    types = (kind,) * len(SIZES)
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=types)


def _masks(rng, count):
    masks = []
    for _ in range(count):
        cuts = np.sort(rng.choice(np.arange(1, SEQ_LEN), 3, replace=False))
        masks.append(mj.masks.varlen(np.diff([0, *cuts, SEQ_LEN]), causal=True))
    return masks


def _stacked(masks):
    """Plans of all masks in one spec, stacked."""
    specs = [mj.make_plan(mask, 2, CONFIG).spec for mask in masks]
    spec = specs[0].union(*specs[1:])
    return mj.stack_plans([mj.make_plan(mask, 2, CONFIG, spec) for mask in masks])


def _tokens(rng, plan, count):
    """Tokens and labels in their own order, and dispatched with no label in padding."""
    plain = rng.integers(0, model.VOCABULARY, (2, count, SEQ_LEN)).astype(np.int32)
    tokens, labels = mj.dispatch(tuple(plain), plan)
    labels = np.where(plan.positions.reshape(labels.shape) < 0, -1, labels)
    return plain, tokens, labels


def _attend(plan, kind):
    options = None if kind == AxisType.Explicit else OVER_AUTOMATIC_AXES
    return lambda q, k, v: mj.dist_attention(q, k, v, plan, options=options)


def _check_collectives(compiled, plan, times):
    """Attention moves what the plan says, ``times`` over; of the rest, gathers bring whole weights
    only, and no array has all pairs of tokens."""
    one = jax.tree.map(lambda leaf: leaf[0], plan)
    planned = one.report().collective_bytes(model.KV_HEADS // 2, model.DIM, dtype="float32")
    assert planned > 0
    assert hlo.collective_bytes(compiled, "all-to-all") == times * planned
    sizes = set()
    for name, weight in model.init(np.random.default_rng(0)).items():
        shape = weight.shape
        layered = name != "embed"
        elements = math.prod(shape) // (2 if "tp" in model.STORED[name] else 1)
        sizes |= {elements, elements // model.LAYERS} if layered else {elements}
    rows = plan.spec.local_len
    gathers = hlo.collectives(compiled, "all-gather")
    assert gathers
    for tensor in (tensor for gather in gathers for tensor in gather.results):
        assert tensor.elements in sizes
        assert rows not in tensor.shape
    assert not hlo.collectives(compiled, "collective-permute")
    assert not hlo.tensors_of_at_least(compiled, 4 * rows**2)


def _compare(found, expected):
    value, grads = jax.tree.map(np.asarray, found)
    np.testing.assert_allclose(value, expected[0], rtol=2e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[1][name], rtol=1e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_scanned_and_rematerialised_layers_with_a_plan_of_their_own_for_each_replica(kind, rng):
    masks = _masks(rng, BATCH)
    plan, params = _stacked(masks), model.init(rng)
    plain, tokens, labels = _tokens(rng, plan, BATCH)
    mesh = _mesh(kind)

    def step(params, tokens, labels, plan):
        ops, attend = model.Ops(kind), _attend(plan, kind)
        return jax.value_and_grad(model.loss)(params, tokens, labels, attend, ops)

    with jax.set_mesh(mesh):
        by_token = NamedSharding(mesh, P(model.BATCH_AXES, "cp"))
        arguments = (
            model.place(params, mesh),
            *jax.device_put((tokens, labels, plan), by_token),
        )
        compiled = jax.jit(step).lower(*arguments).compile()
        found = compiled(*arguments)
    _compare(found, model.reference(params, *plain, masks))
    # Forward, again for the remat, and in the backward pass keys and values once and gradients once.
    _check_collectives(compiled, plan, times=4)


def test_accumulated_gradients_over_microbatches_with_their_own_plans(rng):
    masks = _masks(rng, 2 * BATCH)
    plan, params = _stacked(masks), model.init(rng)
    plain, tokens, labels = _tokens(rng, plan, 2 * BATCH)
    mesh = _mesh(AxisType.Auto)

    def step(params, micro):
        def accumulate(total, micro):
            tokens, labels, plan = micro
            attend = _attend(plan, AxisType.Auto)
            found = jax.value_and_grad(model.loss)(params, tokens, labels, attend)
            return jax.tree.map(jnp.add, total, found), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(accumulate, zeros, micro)[0]

    micro = jax.tree.map(lambda x: x.reshape(2, BATCH, *x.shape[1:]), (tokens, labels, plan))
    with jax.set_mesh(mesh):
        placed = jax.device_put(micro, NamedSharding(mesh, P(None, model.BATCH_AXES, "cp")))
        arguments = model.place(params, mesh), placed
        compiled = jax.jit(step).lower(*arguments).compile()
        found = compiled(*arguments)
    _compare(found, model.reference(params, *plain, masks))
    _check_collectives(compiled, plan, times=4)


def _stored(path, leaf):
    """Where a parameter of the decoder lives: over fsdp and tp."""
    name = jax.tree_util.keystr(path)
    if "norm" in name:
        return P()
    if "'out'" in name:
        return P("tp", None, "fsdp")
    if "'down'" in name:
        return P("tp", "fsdp")
    return P(None, "fsdp") if "embed" in name else P("fsdp", "tp")


def test_decoder_gathers_weights_and_never_the_batch(rng):
    """The Flax decoder with parameters over fsdp and tp, on automatic axes."""
    plan, mesh = _stacked(_masks(rng, BATCH)), _mesh(AxisType.Auto)
    config = mj.flax.DecoderConfig(
        vocab_size=model.VOCABULARY,
        num_layers=1,
        features=model.WIDTH,
        num_heads=model.HEADS,
        num_kv_heads=model.KV_HEADS,
        head_dim=model.DIM,
        hidden=48,
        activations=model.ROWS,
    )
    graphdef, params = nnx.split(mj.flax.Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)
    _, tokens, _ = _tokens(rng, plan, BATCH)

    def loss(params, tokens, plan):
        attends = (mj.flax.attention_fn(plan, options=OVER_AUTOMATIC_AXES),)
        positions = plan.positions.reshape(tokens.shape)
        return (nnx.merge(graphdef, params)(tokens, positions, attends) ** 2).mean()

    with jax.set_mesh(mesh):
        arguments = (
            jax.tree_util.tree_map_with_path(
                lambda path, x: jax.device_put(x, NamedSharding(mesh, _stored(path, x))), params
            ),
            *jax.device_put((tokens, plan), NamedSharding(mesh, P(model.BATCH_AXES, "cp"))),
        )
        compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
    gathers = [t for g in hlo.collectives(compiled, "all-gather") for t in g.results]
    assert len(gathers) > 5
    rows = plan.spec.local_len
    assert not [t for t in gathers if t.elements >= BATCH * rows * model.WIDTH]
    one = jax.tree.map(lambda leaf: leaf[0], plan)
    planned = one.report().collective_bytes(model.KV_HEADS // 2, model.DIM, dtype="float32")
    assert hlo.collective_bytes(compiled, "all-to-all") == 3 * planned


def test_exported_step_takes_other_plans_and_communicates_nothing_else(rng):
    """A train step that was serialised, on a plan that it has not seen: right gradients, and the
    compiled program moves what the plan says and whole weights, as it does before it is exported."""
    mesh = _mesh(AxisType.Auto)
    seen, unseen = _masks(rng, BATCH), _masks(rng, BATCH)
    both = _stacked(seen + unseen)
    plans = [jax.tree.map(operator.itemgetter(part), both) for part in np.split(np.arange(4), 2)]
    _, tree = jax.tree.flatten(both)
    params = model.init(rng)

    @jax.jit
    def step(params, tokens, labels, leaves):  # what is serialised knows nothing of our classes
        attend = _attend(jax.tree.unflatten(tree, leaves), AxisType.Auto)
        return jax.value_and_grad(model.loss)(params, tokens, labels, attend)

    def placed(plan):
        plain, tokens, labels = _tokens(rng, plan, BATCH)
        arrays = tokens, labels, jax.tree.leaves(plan)
        by_token = NamedSharding(mesh, P(model.BATCH_AXES, "cp"))
        return plain, (model.place(params, mesh), *jax.device_put(arrays, by_token))

    with jax.set_mesh(mesh):
        ours = [jax.export.DisabledSafetyCheck.custom_call(t) for t in mj.build_info()["targets"]]
        exported = jax.export.export(step, disabled_checks=ours)(*placed(plans[0])[1])
        restored = jax.export.deserialize(exported.serialize())
        plain, arguments = placed(plans[1])
        compiled = jax.jit(restored.call).lower(*arguments).compile()
        found = compiled(*arguments)
    _compare(found, model.reference(params, *plain, unseen))
    _check_collectives(compiled, plans[1], times=4)
