"""Attention under jit, vmap, remat, scan and shard_map, and what its compiled program holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ops_problem as problem
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from magi_jax import masks
from magi_jax.ops import CONTEXT_NAME, build_info, flex_flash_attention
from magi_jax.plan import slice_table
from magi_jax.testing import hlo

HEADS = problem.Heads(2, 1, 16, 16)
MASK = masks.varlen([90, 3, 58], causal=True)
SIZE = MASK.q_len


@pytest.fixture
def attend():
    return functools.partial(flex_flash_attention, implementation="cpu")


@pytest.fixture
def tensors(rng):
    return problem.tensors(rng, HEADS, k_len=SIZE)[:3]


def batch_of(tensors, size):
    return tuple(jnp.stack([x * (1 + 0.1 * i) for i in range(size)]) for x in tensors)


def assert_all_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


def test_vmap_and_leading_axes(attend, tensors):
    batch = batch_of(tensors, 4)

    def loss(fn):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(fn(*x) ** 2), (0, 1, 2)))

    def one_by_one(q, k, v):
        return jnp.stack([attend(*x, MASK) for x in zip(q, k, v, strict=True)])

    right = loss(one_by_one)(*batch)
    assert_all_close(loss(lambda q, k, v: attend(q, k, v, MASK))(*batch), right)
    assert_all_close(loss(jax.vmap(lambda q, k, v: attend(q, k, v, MASK)))(*batch), right)
    nested = [x.reshape(2, 2, *x.shape[1:]) for x in batch]
    out = attend(*nested, MASK)
    assert_all_close(out.reshape(batch[0].shape), one_by_one(*batch))


def test_vmap_over_masks(attend, tensors):
    """One mask for each row of a batch: tables of one spec, stacked."""
    other = masks.causal(SIZE)
    both = slice_table(MASK).spec.union(slice_table(other).spec)
    tables = [slice_table(m, spec=both) for m in (MASK, other)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tables)
    fn = jax.vmap(lambda t, q, k, v: attend(q, k, v, t), in_axes=(0, None, None, None))
    right = jnp.stack([attend(*tensors, m) for m in (MASK, other)])
    assert_all_close(fn(stacked, *tensors), right)


def test_new_masks_compile_nothing(attend, tensors, rng):
    traces = []

    @jax.jit
    def step(table, q, k, v):
        traces.append(1)
        return jax.grad(lambda q: attend(q, k, v, table).sum())(q)

    def packed(documents):
        cuts = np.sort(rng.choice(np.arange(1, SIZE), documents - 1, replace=False))
        return masks.varlen(np.diff([0, *cuts, SIZE]), causal=True)

    spec = slice_table(packed(20)).spec.scaled(1.5)
    for documents in (1, 2, 5, 20, 30):
        step(slice_table(packed(documents), spec=spec), *tensors)
    assert len(traces) == 1


def test_remat_saves_the_context(tensors):
    """With a policy that saves `context`, the backward pass runs no second forward pass."""
    q, k, v = tensors

    def calls(policy):
        loss = jax.checkpoint(lambda q: flex_flash_attention(q, k, v, MASK).sum(), policy=policy)
        text = str(jax.make_jaxpr(jax.grad(loss))(q))
        return text.count("magi_jax_ffa_forward")

    saving = jax.checkpoint_policies.save_only_these_names(CONTEXT_NAME)
    assert calls(saving) == 1
    assert calls(jax.checkpoint_policies.nothing_saveable) == 2


def test_scan_over_layers(attend, tensors):
    q, k, v = tensors
    table = jax.tree.map(jnp.asarray, slice_table(MASK))

    def layer(x):
        return x + attend(x, k, v, table)

    def scanned(q):
        body = jax.checkpoint(lambda x, _: (layer(x), None))
        return jax.lax.scan(body, q, None, length=3)[0].sum()

    right = jax.jit(jax.grad(lambda q: layer(layer(layer(q))).sum()))(q)
    assert_all_close(jax.jit(jax.grad(scanned))(q), right)


@pytest.mark.parametrize(
    ("implementation", "axis_type"),
    [("cpu", AxisType.Auto), ("cpu", AxisType.Explicit), ("reference", AxisType.Auto)],
)
def test_shard_map_tracks_varying_axes(implementation, axis_type, tensors):
    """Queries differ between ranks, keys do not: results vary, and gradients of keys are summed."""
    q, k, v = tensors
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(axis_type,))
    table = jax.tree.map(jnp.asarray, slice_table(MASK))
    queries = batch_of((q,), 2)[0]
    attend = functools.partial(flex_flash_attention, implementation=implementation)

    def loss(k, v, q):
        body = jax.checkpoint(lambda x, _: (x + attend(x, k, v, table), None))
        return jax.lax.scan(body, q, None, length=2)[0].sum()

    spec = PartitionSpec
    sharded = jax.shard_map(
        lambda k, v, q: jax.grad(lambda k, v: jax.lax.psum(loss(k, v, q[0]), "x"), (0, 1))(k, v),
        mesh=mesh,
        in_specs=(spec(), spec(), spec("x")),
        out_specs=(spec(), spec()),
    )
    right = jax.jit(jax.grad(lambda k, v: sum(loss(k, v, q) for q in queries), (0, 1)))(k, v)
    with jax.set_mesh(mesh):
        queries = jax.device_put(queries, NamedSharding(mesh, spec("x")))
        assert_all_close(jax.jit(sharded)(k, v, queries), right)


def test_eight_devices_at_once(tensors):
    """Handlers of all virtual devices share one pool of threads, and none waits for another."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    spec = PartitionSpec("x")
    batch = batch_of(tensors, 2 * mesh.size)
    step = jax.jit(
        jax.shard_map(
            lambda q, k, v: flex_flash_attention(q, k, v, MASK),
            mesh=mesh,
            in_specs=(spec,) * 3,
            out_specs=spec,
        )
    )
    right = flex_flash_attention(*batch, MASK)
    for _ in range(10):
        out = step(*batch)
        assert_all_close(out, right)


def test_exported_program_leaves_the_batch_open(attend, tensors):
    size = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((*size, *x.shape), x.dtype) for x in tensors]
    table = slice_table(MASK)

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v, table) ** 2)

    def both(q, k, v):
        out, top = attend(q, k, v, MASK, return_max_logits=True)
        return out, top, jax.grad(loss, (0, 1, 2))(q, k, v)

    targets = build_info()["targets"]
    ours = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    exported = jax.export.export(jax.jit(both), disabled_checks=ours)(*shapes)
    for count in (1, 3):
        batch = [np.stack([x * (i + 1) for i in range(count)]) for x in tensors]
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
            exported.call(*batch),
            jax.jit(both)(*batch),
        )


def test_program_holds_no_dense_array(rng):
    size = 1024
    q, k, v = problem.tensors(rng, problem.Heads(1, 1, 8, 8), q_len=size, k_len=size)[:3]
    mask = masks.varlen([600, 424], causal=True, window=(100, 0))
    step = jax.jit(jax.grad(lambda q, k, v: flex_flash_attention(q, k, v, mask).sum(), (0, 1, 2)))
    assert not hlo.tensors_of_at_least(step.lower(q, k, v).compile(), size * size)
