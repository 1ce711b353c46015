"""A transformer in plain functions, sharded over every axis of a mesh, explicit or automatic."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 24, 16, 4, 2, 8, 2
BATCH_AXES = ("dp", "fsdp")
ROWS = P(BATCH_AXES, "cp", None)

# How parameters are stored; layers are stacked in front. Before use, fsdp is gathered.
STORED = {
    "embed": P(None, "fsdp"),
    "query": P(None, "fsdp", "tp", None),
    "key_value": P(None, None, "fsdp", "tp", None),
    "out": P(None, "tp", None, "fsdp"),
    "up": P(None, "fsdp", "tp"),
    "down": P(None, "tp", "fsdp"),
}


def init(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "query": (LAYERS, WIDTH, HEADS, DIM),
        "key_value": (LAYERS, 2, WIDTH, KV_HEADS, DIM),
        "out": (LAYERS, HEADS, DIM, WIDTH),
        "up": (LAYERS, WIDTH, 3 * WIDTH),
        "down": (LAYERS, 3 * WIDTH, WIDTH),
    }
    return {n: (rng.normal(size=s) * s[-1] ** -0.5).astype(np.float32) for n, s in shapes.items()}


def place(params, mesh):
    return {n: jax.device_put(x, NamedSharding(mesh, STORED[n])) for n, x in params.items()}


class Ops(NamedTuple):
    """Where a value lives, said in the way that the mesh's axes want it."""

    kind: AxisType

    def put(self, x, spec):
        if self.kind == AxisType.Explicit:
            return jax.sharding.reshard(x, spec)
        return jax.lax.with_sharding_constraint(x, spec)

    def gathered(self, x, name):
        """A layer's weight without its fsdp shards."""
        spec = [None if axis == "fsdp" else axis for axis in STORED[name]]
        return self.put(x, P(*spec[len(spec) - x.ndim :]))

    def einsum(self, text, *operands, spec):
        if self.kind == AxisType.Explicit:
            return jnp.einsum(text, *operands, out_sharding=spec)
        return jax.lax.with_sharding_constraint(jnp.einsum(text, *operands), spec)


def layer(ops: Ops, x, weights, attend):
    """``x [B, T, D]`` through one block; batch over dp and fsdp, rows over cp, heads over tp."""
    weights = {name: ops.gathered(w, name) for name, w in weights.items()}
    heads = P(BATCH_AXES, "cp", "tp", None)
    query = ops.einsum("btd,dnh->btnh", x, weights["query"], spec=heads)
    key, value = (
        ops.einsum("btd,dnh->btnh", x, weights["key_value"][i], spec=heads) for i in range(2)
    )
    x = x + ops.einsum("btnh,nhd->btd", attend(query, key, value), weights["out"], spec=ROWS)
    hidden = ops.einsum("btd,df->btf", x, weights["up"], spec=P(BATCH_AXES, "cp", "tp"))
    return x + ops.einsum("btf,fd->btd", jax.nn.gelu(hidden), weights["down"], spec=ROWS)


def loss(params, tokens, labels, attend, ops: Ops | None = None, remat: bool = True):
    """Summed cross-entropy of labels that are not negative; layers are scanned."""
    ops = Ops(AxisType.Auto) if ops is None else ops
    embed = ops.gathered(params["embed"], "embed")
    one_hot = jax.nn.one_hot(tokens, VOCABULARY)
    x = ops.einsum("btv,vd->btd", one_hot, embed, spec=ROWS)

    def body(x, weights):
        return layer(ops, x, weights, attend), None

    stacked = {name: w for name, w in params.items() if name != "embed"}
    x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, stacked)
    log_probs = jax.nn.log_softmax(ops.einsum("btd,vd->btv", x, embed, spec=ROWS))
    return -(jax.nn.one_hot(labels, VOCABULARY) * log_probs).sum()


def reference(params, tokens, labels, masks):
    """Loss and gradients on one device, tokens in their own order, one mask per sequence."""

    def attend(q, k, v):
        of_each = [mj.flex_flash_attention(*x, m) for *x, m in zip(q, k, v, masks, strict=True)]
        return jnp.stack(of_each)

    class Alone(Ops):
        def put(self, x, spec):
            return x

        def einsum(self, text, *operands, spec):
            return jnp.einsum(text, *operands)

    def of(params):
        return loss(params, tokens, labels, attend, Alone(AxisType.Auto), remat=False)

    return jax.jit(jax.value_and_grad(of))(params)
