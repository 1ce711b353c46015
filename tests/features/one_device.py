"""Runs a case of `flex_flash_attention` and its float64 twin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from feature_check import (
    QUICK,
    Answer,
    expected,
    implementation_of,
    loss,
    options_of,
    random_inputs,
    remat,
)

from magi_jax import flex_flash_attention, masks
from magi_jax.ops import block_sparse_table
from magi_jax.plan import slice_table
from magi_jax.testing.cases import random_mask

T, S = 140, 170  # two tiles of 128, the second short
BLOCK = 24
BATCH = 2


def run(case, rng, dims) -> tuple[Answer, Answer]:
    """What the case gives, and what it should."""
    k_len = S if case["lengths"] == "cross-attention" else T
    batch = 1 if case["batch"] == "none" else BATCH
    packed = case["batch"] == "one packed stream"
    groups = 1 if case["masks of heads"] == "one" else 2
    inputs = random_inputs(rng, case, (batch,), T, k_len, dims[case["head dims"]])
    size = (batch * T, batch * k_len) if packed else (T, k_len)
    made = [_mask(case, rng, *size, batch if packed else 1) for _ in range(groups)]
    answer = _compute(case, inputs, [table for table, _ in made], size)
    dense = [dense for _, dense in made]
    if not packed:
        return answer, expected(case, inputs, [dense] * batch)
    stream = [x if i == 3 else _flat(x) for i, x in enumerate(inputs)]
    want = expected(case, type(inputs)(*stream), [dense])
    shapes = [x.shape for x in (inputs.dout, inputs.dlse)]
    unpacked = dict(zip(("out", "lse"), shapes, strict=True))
    unpacked |= {"dq": inputs.q.shape, "dk": inputs.k.shape, "dv": inputs.v.shape}
    return answer, want._replace(
        **{name: getattr(want, name).reshape(shape) for name, shape in unpacked.items()}
    )


def _flat(x):
    return x.reshape(1, -1, *x.shape[2:])


def _mask(case, rng, q_len, k_len, rows):
    """A mask as `flex_flash_attention` takes it, or its blocks, and the dense array."""
    kind = case["mask"]
    if kind == "blocks chosen on the device":
        blocks = rng.random((-(-q_len // BLOCK), -(-k_len // BLOCK))) < 0.4
        return blocks, blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)[:q_len, :k_len]
    parts = [_one_mask(kind, rng, q_len // rows, k_len // rows) for _ in range(rows)]
    mask = masks.concatenate(parts)
    return slice_table(mask), mask.dense()


def _one_mask(kind, rng, q_len, k_len):
    if kind == "random":
        return random_mask(rng, q_len, k_len, 8)
    # The last documents see nothing.
    lengths, k_lengths = [50, 0, q_len - 70, 20], [61, 3, k_len - 64, 0]
    return masks.varlen(lengths, k_lengths=k_lengths, causal=True)


def _compute(case, inputs, tables, size) -> Answer:
    returns_max = case["max logits"] == "returned"

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(inputs, tables):
        q, k, v, sinks, dout, dlse = inputs
        if case["mask"] == "blocks chosen on the device":
            tables = [block_sparse_table(blocks, BLOCK, *size) for blocks in tables]
        if case["batch"] == "none":
            q, k, v, dout, dlse = (x[0] for x in (q, k, v, dout, dlse))

        def attend(q, k, v, sinks):
            return flex_flash_attention(
                q,
                k,
                v,
                tables if len(tables) > 1 else tables[0],
                sinks=sinks,
                deterministic=case["deterministic"] == "asked",
                return_residual=True,
                return_max_logits=returns_max,
                implementation=implementation_of(case),
                **options_of(case),
            )

        def value(operands):
            results = remat(case, attend)(*operands)
            return loss(case, results, dout, dlse), results

        gradients, results = jax.grad(value, has_aux=True)((q, k, v, sinks))
        return results, gradients

    (out, lse, *top), gradients = both(jax.tree.map(jnp.asarray, inputs), tables)
    arrays = [out, lse, *gradients[:3]]
    if case["batch"] == "none":
        arrays = [x[None] for x in arrays]
    arrays = [np.asarray(x, np.float64) for x in arrays]
    return Answer(*arrays[:2], top[0] if top else None, *arrays[2:], gradients[3])
