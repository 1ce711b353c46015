"""Prints a digest of losses and gradients of many calls; for `test_command_buffers.py`."""

import functools
import hashlib
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import magi_jax as mj
from magi_jax.plan import slice_table

# With so many keys, and without and with pairs of thread blocks.
TOKENS, HEADS, KV_HEADS, DIM = (1000, 2304), 8, 2, 128
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


def tables(tokens: int):
    """Tables of one size, so that one program serves them."""
    documents = [tokens], [300, tokens - 300], [10, 480, tokens - 490]
    masks = [mj.masks.varlen(lengths, causal=True) for lengths in documents]
    first, *others = (slice_table(mask).spec for mask in masks)
    spec = first.union(*others)
    return [slice_table(mask, spec=spec) for mask in masks]


def main() -> None:
    """One line for each implementation, number of tokens and of layers."""
    kept: list = []  # arrays of calls that are over, so that the next ones get other buffers
    for tokens in TOKENS:
        all_tables = tables(tokens)
        for implementation, layers in itertools.product(sys.argv[1:], LAYERS):
            digest = hashlib.sha256()
            for call in range(CALLS):
                rng = np.random.default_rng(call)
                operands = [
                    jnp.asarray(rng.standard_normal((tokens, n, DIM), np.float32), jnp.bfloat16)
                    for n in (HEADS, KV_HEADS, KV_HEADS)
                ]
                table = jax.device_put(all_tables[call % len(all_tables)])
                results = step(*operands, table, layers=layers, implementation=implementation)
                kept += [operands, results if call % 2 else None]
                for x in jax.tree.leaves(results):
                    digest.update(np.asarray(x, np.float32).tobytes())
            print(implementation, tokens, layers, digest.hexdigest())


if __name__ == "__main__":
    main()
