"""Settings of JAX that refuse what is usually forgiven, or widen types: all can be traced under them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import magi_jax as mj
from magi_jax.ops import lse
from magi_jax.plan import PlanConfig, slice_table

SETTINGS = {
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
    "64-bit types": lambda: jax.enable_x64(True),
    "leaks": jax.checking_leaks,
    "checks": lambda: jax.enable_checks(True),
}
CP, TOKENS, HEADS, KV_HEADS, DIM = 4, 128, 4, 2, 8
MASK = mj.masks.varlen([50, 10, 68], causal=True) | mj.masks.global_rows(TOKENS, rows=(0, 8))
PLANS = {
    "own": {},
    "stages": {"overlap": 2, "travelling": "never"},
    "travelling": {"travelling": [(0, 8)]},
    "late": {"overlap": "late", "travelling": "never"},
    "nodes": {"ranks_per_node": 2, "two_level": True, "overlap": 2},
}


@pytest.fixture(params=SETTINGS)
def setting(request):
    return SETTINGS[request.param]


def shapes(*lead, dtype=jnp.bfloat16):
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [jax.ShapeDtypeStruct((*lead, TOKENS, n, DIM), dtype) for n in heads]


def trace(setting, attend, operands, sinks_dtype=jnp.bfloat16):
    """Traces results and gradients; compiling them would find nothing more."""

    def run(q, k, v, sinks):
        results, pull_back = jax.vjp(attend, q, k, v, sinks)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    with setting():
        results, grads = jax.eval_shape(run, *operands, jax.ShapeDtypeStruct((HEADS,), sinks_dtype))
    out, *statistics = jax.tree.leaves(results)
    assert out.dtype == operands[0].dtype
    assert all(x.dtype == jnp.float32 for x in statistics)
    assert [g.dtype for g in grads] == [*(x.dtype for x in operands), sinks_dtype]


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("mask", ["mask", "table", "blocks"])
def test_one_device(setting, implementation, mask):
    def attend(q, k, v, sinks):
        masks = {
            "mask": lambda: MASK,
            "table": lambda: slice_table(MASK),
            "blocks": lambda: mj.block_sparse_table(q[:4, 0, :4] > 0, 32, TOKENS, causal=True),
        }
        return mj.flex_flash_attention(
            *(jnp.stack([x, x]) for x in (q, k, v)),
            masks[mask](),
            sinks=sinks,
            logits_soft_cap=3.0,
            return_residual=True,
            return_max_logits=True,
            implementation=implementation,
        )

    trace(setting, attend, shapes())


# Nothing is cached where leaks are looked for, which takes seconds; a batch does what one sequence does.
SETTINGS_AND_BATCHES = [
    pytest.param(name, batch, id=f"{name}-{'batch' if batch else 'one sequence'}")
    for name in SETTINGS
    for batch in ((), (2,))
    if batch or name != "leaks"
]


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(("setting", "batch"), SETTINGS_AND_BATCHES, indirect=["setting"])
def test_several_devices(setting, kind, batch):
    mesh = jax.make_mesh((CP,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:CP])
    plan = mj.make_plan(MASK, CP, PlanConfig(chunk_size=8, roll_shifts=(-1,), **PLANS[kind]))

    def attend(q, k, v, sinks):
        axis = len(batch)
        q, k, v = (mj.dispatch(x, plan, mesh=mesh, axis=axis) for x in (q, k, v))
        q = mj.roll(q, plan, -1, mesh=mesh, axis=axis)
        out, *rest = mj.dist_attention(
            q, k, v, plan, mesh=mesh, sinks=sinks, return_residual=True, return_max_logits=True
        )
        return mj.undispatch(out, plan, mesh=mesh, axis=axis), *rest

    trace(setting, attend, shapes(*batch))


def test_merging_and_dot_products(setting):
    def attend(q, k, v, sinks):
        del sinks
        out = mj.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        logits = out[..., 0].astype(jnp.float32)
        merged, total = lse.merge(out, logits, out, logits)
        return (out + merged.astype(out.dtype)), total

    with setting():
        jax.eval_shape(lambda *x: jax.vjp(attend, *x, None)[0], *shapes())


def test_layers(setting):
    from flax import nnx

    from magi_jax.flax.layers import Attention

    def attend(q, k, v, sinks):
        return mj.flex_flash_attention(q, k, v, MASK, sinks=sinks)

    def run(x, positions):
        layer = Attention(
            16, HEADS, KV_HEADS, DIM, sinks=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
        return layer(x, positions, attend)

    with setting():
        out = jax.eval_shape(run, jnp.ones((TOKENS, 16), jnp.bfloat16), jnp.arange(TOKENS))
    assert out.dtype == jnp.bfloat16
