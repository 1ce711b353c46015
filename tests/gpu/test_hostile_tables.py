"""Device code clamps what it reads from a table: no entry leads it out of its buffers or into a hang.

The contents of a table cannot be checked from the host. Results of a damaged table mean nothing; that
the next call is right, and what compute-sanitizer says of this file, means something:

    compute-sanitizer --kernel-regex kns=magi_jax python -m pytest tests/gpu/test_hostile_tables.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import PATHS

import magi_jax as mj

TABLES = 60
HOSTILE_INTEGERS = (
    *(-(2**31), -(2**30), -129, -1, 0, 1, 127, 128, 129, 500),
    *(2**20, 2**30, 2**31 - 129, 2**31 - 1),
)


def _damaged(rng, table, name):
    """The table with some entries changed: in any of its arrays, of short documents in the slices alone.

    Else few tables of these would still be taken for documents.
    """
    if name == "short_documents":
        slices = np.array(table.slices)
        slices.flat[rng.integers(slices.size)] += rng.integers(-2, 3)
        slices[rng.integers(len(slices)), rng.integers(4, 6)] = rng.choice(HOSTILE_INTEGERS)
        return dataclasses.replace(table, slices=slices)
    leaves, structure = jax.tree.flatten(table)
    leaves = [np.array(leaf) for leaf in leaves]
    for _ in range(int(rng.integers(1, 6))):
        leaf = leaves[rng.integers(len(leaves))]
        leaf.flat[rng.integers(leaf.size)] = rng.choice(HOSTILE_INTEGERS)
    return jax.tree.unflatten(structure, leaves)


def _masks():
    """Documents with rows that see all of them; few queries of many keys, whose walks Hopper cuts;
    documents whose tiles wait for each other in Hopper's backward; and more queries than a short
    call of it has."""
    documents = mj.masks.varlen([200, 1, 130, 69], causal=True)
    return {
        "documents": documents | mj.masks.global_rows(400, rows=(380, 400)),
        "long_walks": mj.masks.causal(150, 4300, offset=4150),
        "short_documents": mj.masks.varlen([40, 300, 129, 64, 190] * 5, causal=True),
        "many_queries": mj.masks.local(2200, window=(300, 0)),
    }


@pytest.mark.parametrize("name", _masks())
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_damaged_tables(path, name):
    rng = np.random.default_rng(0)
    mask = _masks()[name]
    heads, kv_heads = (32, 4) if name == "short_documents" else (4, 2)
    rows, keys = (mask.q_len, heads, 128), (mask.k_len, kv_heads, 128)
    shapes = (rows, keys, keys, rows)
    q, k, v, dout = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    table = mj.slice_table(mask)

    @jax.jit
    def run(table):
        def attend(q, k, v):
            return mj.flex_flash_attention(q, k, v, table, implementation=path.name)

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(dout)

    if name == "short_documents" and path.name == "sm90":
        items = path.backward_items(
            dout, q, k, v, *2 * [jnp.zeros((mask.q_len, heads))],
            table=table, dq_dtype=q.dtype, scale=0.1, logits_soft_cap=0.0,
        )  # fmt: skip
        assert int(items.documents) > 0
    expected = jax.block_until_ready(run(table))
    for _ in range(TABLES):
        jax.block_until_ready(run(_damaged(rng, table, name)))
    for before, after in zip(expected, run(table), strict=True):
        error = jnp.linalg.norm((before - after).astype(jnp.float32))
        assert error <= 1e-2 * jnp.linalg.norm(before.astype(jnp.float32))
