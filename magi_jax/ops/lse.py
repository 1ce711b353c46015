"""Merging of attention over disjoint sets of keys."""

import jax
import jax.numpy as jnp


def merge(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint sets of keys, from attention over each of them.

    Differentiable in all arguments; a row that sees no key in either set has finite (zero) gradients.

    Args:
        out_a: ``[T, N, Hv]``, computed with in float32.
        lse_a: ``[T, N]`` float32 natural log; -inf in rows that see no key of this set.
        out_b: as ``out_a``, for the other set.
        lse_b: as ``lse_a``, for the other set.

    Returns:
        ``out [T, N, Hv]`` float32 and ``lse [T, N]``; 0 and -inf in rows that see no key in either set.
    """
    top = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight_a, weight_b = _exp(lse_a - top), _exp(lse_b - top)
    total = weight_a + weight_b
    empty = total == 0.0
    # Guarded twice, so that neither branch of a derivative is NaN.
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    out = out_a.astype(jnp.float32) * share_a + out_b.astype(jnp.float32) * share_b
    return out, lse


def _exp(x: jax.Array) -> jax.Array:
    """Exponential that is constant at -inf, where ``x`` itself has no derivative."""
    finite = x > -jnp.inf
    return jnp.where(finite, jnp.exp(jnp.where(finite, x, 0.0)), jnp.where(jnp.isnan(x), x, 0.0))


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lets sinks, logits without a value, take part in the softmax of every row.

    Args:
        out: ``[T, N, Hv]`` float32.
        lse: ``[T, N]``.
        sinks: ``[N]``, or ``[X, N]`` for X sinks of each head.

    Returns:
        ``out`` and ``lse``; rows that see no key have ``out = 0`` and the logsumexp of their sinks.
    """
    sinks = sinks.astype(jnp.float32).reshape(-1, sinks.shape[-1])
    total = jnp.logaddexp(lse, jax.nn.logsumexp(sinks, axis=0, keepdims=True))
    kept = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(lse - total))
    return out * kept[..., None], total


def max_of_rows(row_max: jax.Array) -> jax.Array:
    """Largest logit of each head ``[N]`` from those of rows ``[T, N]``; -inf where there is no row."""
    return jnp.max(jax.lax.stop_gradient(row_max), axis=0, initial=-jnp.inf)


def sinks_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Gradient of sinks, summed over rows, in their shape; float32.

    Args:
        sinks: ``[N]`` or ``[X, N]``.
        lse: ``[T, N]`` of the result, sinks included.
        delta: ``[T, N]``, ``sum(dout * out) - dlse`` of the result.
    """
    logits = sinks.astype(jnp.float32).reshape(-1, 1, sinks.shape[-1])
    share = jnp.where(logits == -jnp.inf, 0.0, jnp.exp(logits - lse[None]))
    return -jnp.sum(share * delta[None], axis=1).reshape(sinks.shape)
