"""No document sees another: changing one leaves the others' results and gradients bit for bit."""

import itertools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import magi_jax as mj
from magi_jax.flax import Decoder, DecoderConfig, attention_fn
from magi_jax.plan.part_specs import TableSpec

LENGTHS = [70, 1, 33, 0, 129, 19]
EDGES = np.cumsum([0, *LENGTHS])
SIZE = int(EDGES[-1])
HEADS = (4, 2, 16, 8)  # N, K, H, Hv
CHANGES = {"other tokens": None, "huge": 1e30, "NaN": np.nan, "infinity": np.inf}
TABLE_SPEC = TableSpec(SIZE, SIZE, 128, *(16,) * 5)


def _masks():
    return {
        "causal": mj.masks.varlen(LENGTHS, causal=True),
        "full": mj.masks.varlen(LENGTHS),
        "window": mj.masks.varlen(LENGTHS, window=(9, 4)),
    }


def _inputs(rng, *lead):
    heads, kv_heads, dim, v_dim = HEADS
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim), (heads,))
    return [rng.normal(size=(*lead, SIZE, *shape)).astype(np.float32) for shape in shapes]


def _changed(rng, inputs, rows, value):
    changed = [x.copy() for x in inputs]
    for x in changed[:-1]:  # the cotangent of lse stays
        x[rows] = rng.normal(size=x[rows].shape) if value is None else value
    return changed


def _with_gradients(attend):
    """A jitted function of operands and cotangents that gives results and gradients."""

    @jax.jit
    def run(q, k, v, dout, dlse, *plan):
        results, pull_back = jax.vjp(lambda *x: attend(*x, *plan), q, k, v)
        return (*results, *pull_back((dout, dlse)))

    return run


def _assert_others_keep_their_bits(run, rng, value, *plan):
    inputs = _inputs(rng)
    before = [np.asarray(x) for x in run(*inputs, *plan)]
    for start, end in itertools.pairwise(EDGES):
        changed = _changed(rng, inputs, slice(start, end), value)
        after = [np.asarray(x) for x in run(*changed, *plan)]
        if end > start:
            assert any(
                (a[start:end] != b[start:end]).any() for a, b in zip(before, after, strict=True)
            )
        for a, b in zip(before, after, strict=True):
            others = np.r_[0:start, end:SIZE]
            np.testing.assert_array_equal(a[others].view(np.uint32), b[others].view(np.uint32))


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_flex_flash_attention(implementation, rng):
    tables = {name: mj.slice_table(mask, spec=TABLE_SPEC) for name, mask in _masks().items()}

    def attend(q, k, v, table):
        return mj.flex_flash_attention(
            q, k, v, table, return_residual=True, implementation=implementation
        )

    run = _with_gradients(attend)
    for table in tables.values():
        for value in CHANGES.values():
            _assert_others_keep_their_bits(run, rng, value, table)


def test_dist_attention(rng):
    """One program over eight devices with stages, for all masks."""
    config = mj.PlanConfig(chunk_size=8, overlap=2, roll_shifts=())
    specs = [mj.make_plan(mask, 8, config).spec for mask in _masks().values()]
    spec = specs[0].union(*specs[1:])
    mesh = jax.make_mesh((8,), ("cp",), (AxisType.Auto,))

    def attend(q, k, v, plan):
        return mj.dist_attention(q, k, v, plan, mesh=mesh, return_residual=True)

    run = _with_gradients(attend)

    def whole(*operands):
        *inputs, plan = operands
        return mj.undispatch([np.asarray(x) for x in run(*mj.dispatch(inputs, plan), plan)], plan)

    for mask in _masks().values():
        plan = mj.make_plan(mask, 8, config, spec)
        for value in CHANGES.values():
            _assert_others_keep_their_bits(whole, rng, value, plan)


def test_dot_product_attention(rng):
    """Sequences of a batch, and the future of a token."""
    inputs = _inputs(rng, 2)

    @_with_gradients
    def run(q, k, v):
        return mj.dot_product_attention(q, k, v, is_causal=True, return_residual=True)

    before = run(*inputs)
    for value in CHANGES.values():
        after = run(*_changed(rng, inputs, (1,), value))
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a[0], b[0])
            assert (a[1] != b[1]).any()
        after = run(*_changed(rng, inputs, (slice(None), slice(100, None)), value))
        for a, b in zip(before[:2], after[:2], strict=True):
            np.testing.assert_array_equal(a[:, :100], b[:, :100])


def test_flax_layer(rng):
    """A decoder: embeddings in, logits out."""
    config = DecoderConfig(
        vocab_size=32, num_layers=1, features=16, num_heads=4, num_kv_heads=2, head_dim=8, hidden=32
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    attends = (attention_fn(_masks()["causal"]),)
    graph, state = nnx.split(model)
    weights = jnp.asarray(rng.normal(size=(SIZE, 32)), jnp.float32)
    positions = jnp.concatenate([jnp.arange(n) for n in LENGTHS])

    @jax.jit
    def run(tokens, offsets):
        def loss(offsets):
            model = nnx.merge(graph, state)
            x = model.embed(tokens) + offsets
            for block in model.blocks:
                x = block(x, positions, attends[0])
            logits = model.head(model.norm(x))
            return (logits * weights).sum(), logits

        gradients, logits = jax.grad(loss, has_aux=True)(offsets)
        return logits, gradients

    tokens = rng.integers(0, 32, SIZE)
    offsets = rng.normal(size=(SIZE, 16)).astype(np.float32)
    before = run(tokens, offsets)
    for start, end in itertools.pairwise(EDGES):
        other = tokens.copy()
        other[start:end] = (other[start:end] + 1) % 32
        after = run(other, offsets)
        others = np.r_[0:start, end:SIZE]
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a[others], b[others])
            assert end == start or (a[start:end] != b[start:end]).any()
