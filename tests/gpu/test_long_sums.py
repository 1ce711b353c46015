"""Sums over half a million keys in bfloat16 are as exact as cuDNN's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import PATHS

import magi_jax as mj

KEYS, QUERIES, HEADS, DIM = 2**19, 128, 2, 128


def _exact(q, k, v, dout):
    """Out, dq, dk and dv in float64, head by head."""
    results = []
    for head in range(HEADS):
        q1, k1, v1, g = (np.asarray(x[:, head], np.float64) for x in (q, k, v, dout))
        logits = q1 @ k1.T * DIM**-0.5
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        out = probs @ v1
        dlogits = probs * (g @ v1.T - (g * out).sum(-1, keepdims=True)) * DIM**-0.5
        results.append((out, dlogits @ k1, dlogits.T @ q1, probs.T @ g))
    return [np.stack(x, axis=1) for x in zip(*results, strict=True)]


def _errors(attend, inputs, exact):
    out, pull_back = jax.vjp(attend, *inputs[:3])
    got = (out, *pull_back(inputs[3]))
    return [
        float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
        for a, b in zip(got, exact, strict=True)
    ]


@pytest.mark.parametrize("offset", [0.0, 0.25], ids=["around zero", "with a mean"])
def test_half_a_million_keys(offset):
    rng = np.random.default_rng(0)
    shapes = ((QUERIES, HEADS, DIM), (KEYS, HEADS, DIM), (KEYS, HEADS, DIM), (QUERIES, HEADS, DIM))
    inputs = [rng.standard_normal(shape, np.float32) for shape in shapes]
    # Values that depend on keys: else dq is a difference of equals, and its error that of a rounded out.
    inputs[2] += inputs[1] + offset
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in inputs]
    exact = _exact(*inputs)

    def cudnn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    theirs = _errors(jax.jit(cudnn), inputs, exact)
    mask = mj.masks.full(QUERIES, KEYS)
    for path in PATHS:

        def ours(q, k, v, name=path.name):
            return mj.flex_flash_attention(q, k, v, mask, implementation=name)

        errors = _errors(jax.jit(ours), inputs, exact)
        print(f"out, dq, dk, dv of {path.name}: {errors}, of cuDNN: {theirs}")
        for mine, other in zip(errors, theirs, strict=True):
            assert mine <= 1.25 * other + 1e-4, (path.name, errors, theirs)
