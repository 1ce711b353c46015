"""Prints a digest of losses and gradients of many calls; for `test_command_buffers.py`."""

import functools
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import magi_jax as mj
from magi_jax.plan import slice_table
from magi_jax.plan.slice_table import build_table, exact_spec

TOKENS, HEADS, KV_HEADS, DIM = 1000, 8, 2, 128
MASKS = [mj.masks.varlen(n, causal=True) for n in ([1000], [300, 700], [10, 480, 510])]
LAYERS, CALLS = (1, 3), 6


@functools.partial(jax.jit, static_argnames=("layers", "implementation"))
def step(q, k, v, table, *, layers, implementation):
    """A loss and its gradients; layers are a loop, which may be in a command buffer too."""

    def loss(q, k, v):
        def layer(x, _):
            return x + mj.flex_flash_attention(x, k, v, table, implementation=implementation), None

        out, _ = jax.lax.scan(layer, q, None, length=layers)
        return (out.astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


def tables():
    """Tables of one size, so that one program serves them."""
    part = [np.zeros(mask.num_slices, np.int64) for mask in MASKS]
    specs = [
        exact_spec(build_table(mask.slices, each, 1, TOKENS, TOKENS, 128))
        for mask, each in zip(MASKS, part, strict=True)
    ]
    spec = specs[0].union(*specs[1:])
    return [slice_table(mask, spec=spec) for mask in MASKS]


def main() -> None:
    """One line for each implementation and number of layers."""
    kept: list = []  # arrays of calls that are over, so that the next ones get other buffers
    all_tables = tables()
    for implementation in sys.argv[1:]:
        for layers in LAYERS:
            digest = hashlib.sha256()
            for call in range(CALLS):
                rng = np.random.default_rng(call)
                operands = [
                    jnp.asarray(rng.standard_normal((TOKENS, n, DIM), np.float32), jnp.bfloat16)
                    for n in (HEADS, KV_HEADS, KV_HEADS)
                ]
                table = jax.device_put(all_tables[call % len(MASKS)])
                results = step(*operands, table, layers=layers, implementation=implementation)
                kept += [operands, results if call % 2 else None]
                for x in jax.tree.leaves(results):
                    digest.update(np.asarray(x, np.float32).tobytes())
            print(implementation, layers, digest.hexdigest())


if __name__ == "__main__":
    main()
