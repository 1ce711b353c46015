"""Attention sinks: logits that join every softmax of their head and have no value."""

import jax
import jax.numpy as jnp


def apply_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds sinks to finished attention.

    Args:
        out: ``[T, N, Hv]`` float32.
        lse: ``[T, N]`` float32.
        sinks: ``[N]``.

    Returns:
        ``out`` and ``lse`` with the sinks in every softmax; rows without keys have ``lse = sinks``.
    """
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype))
    kept = jnp.where(lse > -jnp.inf, jnp.exp(lse - total), 0.0)
    return out * kept[..., None], total


def sinks_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Gradient of ``sinks [N]``, float32, from the final ``lse [T, N]`` and ``delta [T, N]``."""
    sinks = sinks.astype(lse.dtype)
    share = jnp.where(sinks > -jnp.inf, jnp.exp(sinks - lse), 0.0)
    return -jnp.sum(share * delta, axis=0)
