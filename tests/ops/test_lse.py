"""Merging of partial attention."""

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax import flex_flash_attention, masks
from magi_jax.ops import merge
from magi_jax.testing import oracle


def parts(rng):
    """Attention over two sets of keys of one query row each: both, one, or none of them seen."""
    q, k, v = (rng.standard_normal(shape) for shape in ((4, 2, 8), (12, 2, 8), (12, 2, 8)))
    left = np.zeros((4, 12), bool)
    left[0, :5] = left[1, :5] = True
    right = np.zeros((4, 12), bool)
    right[0, 5:] = right[2, 5:] = True
    return [oracle.attention(q, k, v, mask) for mask in (left, right, left | right)]


def test_merge_is_attention_over_the_union(rng):
    (out_a, lse_a), (out_b, lse_b), (out, lse) = parts(rng)
    merged = merge(*(jnp.asarray(x, jnp.float32) for x in (out_a, lse_a, out_b, lse_b)))
    np.testing.assert_allclose(merged[0], out, atol=1e-6)
    np.testing.assert_allclose(merged[1], lse, atol=1e-6)
    assert (np.asarray(merged[0])[3] == 0).all()
    assert np.isneginf(merged[1][3]).all()


def test_merge_is_differentiable(rng):
    (out_a, lse_a), (out_b, lse_b), _ = parts(rng)
    inputs = [jnp.asarray(x, jnp.float32) for x in (out_a, lse_a, out_b, lse_b)]
    weight = jnp.asarray(rng.standard_normal(out_a.shape), jnp.float32)

    def loss(*inputs):
        out, lse = merge(*inputs)
        return jnp.sum(out * weight) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0))

    gradients = jax.grad(loss, (0, 1, 2, 3))(*inputs)
    assert all(np.isfinite(g).all() for g in gradients)
    assert all((np.asarray(g)[3] == 0).all() for g in gradients[1::2])
    step = 1e-2
    for argument in (1, 3):  # lse of the row that both sets serve
        bumped = [
            [x.at[0].add(sign * step) if i == argument else x for i, x in enumerate(inputs)]
            for sign in (1, -1)
        ]
        numeric = (loss(*bumped[0]) - loss(*bumped[1])) / (2 * step)
        np.testing.assert_allclose(gradients[argument][0].sum(), numeric, rtol=2e-2, atol=2e-3)


def test_merge_of_large_values(rng):
    out = jnp.ones((1, 1, 3))
    for a, b in ((1e4, -1e4), (-1e4, 1e4), (3e38, 3e38)):
        merged, lse = merge(out, jnp.full((1, 1), a), 2 * out, jnp.full((1, 1), b))
        assert np.isfinite(merged).all()
        assert lse >= max(a, b)


def test_sinks_of_minus_infinity_are_none(rng):
    """As a model that is to have none of a head's may start; also in rows that see no key."""
    mask = masks.varlen([5, 6], causal=True).shift(0, 0, 16, 16)
    q, k, v = (jnp.asarray(rng.standard_normal((16, 2, 8)), jnp.float32) for _ in range(3))

    def attend(q, k, v, sinks):
        return flex_flash_attention(q, k, v, mask, sinks=sinks, return_residual=True)

    def loss(q, k, v, sinks):
        out, lse = attend(q, k, v, sinks)
        return jnp.sum(out**2) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0))

    absent = jnp.full(2, -jnp.inf)
    for with_sinks, without in zip(attend(q, k, v, absent), attend(q, k, v, None), strict=True):
        np.testing.assert_allclose(with_sinks, without, atol=1e-6)
    *gradients, of_sinks = jax.grad(loss, (0, 1, 2, 3))(q, k, v, absent)
    np.testing.assert_array_equal(of_sinks, 0)
    for got, wanted in zip(gradients, jax.grad(loss, (0, 1, 2))(q, k, v, None), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
