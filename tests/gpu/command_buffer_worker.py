"""Prints a digest of losses and gradients of many calls; for `test_command_buffers.py`."""

import functools
import hashlib
import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import magi_jax as mj
from magi_jax.ops import cuda
from magi_jax.plan import slice_table

# With so many keys, and without and with pairs of thread blocks.
TOKENS, HEADS, KV_HEADS, DIM = (1000, 2304), 8, 2, 128
LAYERS, CALLS = (1, 3), 6
# So many short documents have a kernel of their own in Hopper's backward, in which tiles hand on
# dQ in a fixed order, and which splits none of these: bits can be compared.
DOCUMENTS, DOCUMENT_HEADS, DOCUMENT_KV_HEADS = [1, 60, 64, 65, 127, 128, 129, 190, 257] * 8, 32, 4


@functools.partial(jax.jit, static_argnames=("layers", "implementation"))
def step(q, k, v, table, *, layers, implementation):
    """A loss and its gradients; layers are a loop, which may be in a command buffer too."""

    def loss(q, k, v):
        def layer(x, _):
            return x + mj.flex_flash_attention(x, k, v, table, implementation=implementation), None

        out, _ = jax.lax.scan(layer, q, None, length=layers)
        return (out.astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


class Problem(NamedTuple):
    """Calls of one program.

    Attributes:
        label: what its line begins with.
        implementation: that attends.
        heads: of queries.
        kv_heads: of keys and values.
        documents: lengths of causal documents, of each table in turns.
        compared: how many of these have gradients whose bits can be compared.
    """

    label: str
    implementation: str
    heads: int
    kv_heads: int
    documents: tuple[list[int], ...]
    compared: int


def problems(names: list[str]) -> Iterator[Problem]:
    """Each implementation with each number of tokens; `documents` stands for Hopper's short ones."""
    for tokens, name in itertools.product(TOKENS, names):
        documents = [tokens], [300, tokens - 300], [10, 480, tokens - 490]
        if name != "documents":
            yield Problem(f"{name} {tokens}", name, HEADS, KV_HEADS, documents, len(documents))
    if "documents" in names:
        shuffled = (
            [int(x) for x in np.random.default_rng(i).permutation(DOCUMENTS)] for i in range(3)
        )
        # The last is for the kernel of other masks, whose sums have no fixed order.
        documents = *shuffled, [sum(DOCUMENTS) - 900, 900]
        yield Problem("documents", "sm90", DOCUMENT_HEADS, DOCUMENT_KV_HEADS, documents, 3)


def tables(documents):
    """Tables of one size, so that one program serves them."""
    masks = [mj.masks.varlen(lengths, causal=True) for lengths in documents]
    first, *others = (slice_table(mask).spec for mask in masks)
    spec = first.union(*others)
    return [slice_table(mask, spec=spec) for mask in masks]


def check_kernels(problem: Problem, operands, all_tables) -> None:
    """Refuses tables of documents that go to another kernel, or others that go to theirs."""
    q, k, v = operands
    stats = [jnp.zeros(q.shape[:2])] * 2
    for i, table in enumerate(all_tables):
        items = cuda.SM90.backward_items(
            q, q, k, v, *stats, table=table, dq_dtype=q.dtype, scale=0.1, logits_soft_cap=0.0
        )
        if (int(items.documents) > 0) != (i < problem.compared):
            raise SystemExit(f"table {i} of {problem.label} has {items}")


def main() -> None:
    """One line for each problem and number of layers."""
    kept: list = []  # arrays of calls that are over, so that the next ones get other buffers
    for problem in problems(sys.argv[1:]):
        all_tables = tables(problem.documents)
        tokens = sum(problem.documents[0])
        for layers in LAYERS:
            digest = hashlib.sha256()
            for call in range(CALLS):
                rng = np.random.default_rng(call)
                operands = [
                    jnp.asarray(rng.standard_normal((tokens, n, DIM), np.float32), jnp.bfloat16)
                    for n in (problem.heads, problem.kv_heads, problem.kv_heads)
                ]
                if call == 0 and problem.label == "documents":
                    check_kernels(problem, operands, all_tables)
                turn = call % len(all_tables)
                table = jax.device_put(all_tables[turn])
                implementation = problem.implementation
                results = step(*operands, table, layers=layers, implementation=implementation)
                kept += [operands, results if call % 2 else None]
                for x in jax.tree.leaves(results) if turn < problem.compared else []:
                    digest.update(np.asarray(x, np.float32).tobytes())
            print(problem.label, layers, digest.hexdigest())


if __name__ == "__main__":
    main()
