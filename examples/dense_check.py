"""Plain attention with a dense mask on one device, to check the distributed model against."""

import jax
import jax.numpy as jnp
import numpy as np

QUERY_BLOCK = 512


def dense_attention(visible: jax.Array):
    """Softmax attention under a dense boolean mask ``[R, L, L]``, one sequence and block of rows at a time.

    Returns a function ``(q [R, L, N, H], k [R, L, K, H], v [R, L, K, Hv]) -> [R, L, N, Hv]``. Each block is
    computed again in the backward pass, so that a laptop can hold it.
    """

    @jax.checkpoint
    def block(q, k, v, seen):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        logits = jnp.einsum("qnh,knh->nqk", q, k) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
        weights = jnp.where(seen, weights, 0.0)  # rows that see nothing, such as padding, give 0
        return jnp.einsum("nqk,knh->qnh", weights, v)

    def sequence(inputs):
        q, k, v, seen = inputs
        length, rows = len(q), min(QUERY_BLOCK, len(q))
        # Blocks of one size; the rows that fill up the last see nothing and are left out again.
        q = jnp.pad(q, ((0, -length % rows), (0, 0), (0, 0)))
        seen = jnp.pad(seen, ((0, -length % rows), (0, 0)))
        out = jax.lax.map(
            lambda part: block(part[0], k, v, part[1]),
            (q.reshape(-1, rows, *q.shape[1:]), seen.reshape(-1, rows, len(k))),
        )
        return out.reshape(-1, *out.shape[2:])[:length]

    return lambda q, k, v: jax.lax.map(sequence, (q, k, v, visible))


def largest_difference(tree, reference) -> float:
    """Largest difference of any leaf from the reference, in norms and relative to that leaf's."""

    def leaf(x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return np.linalg.norm(x - y) / np.linalg.norm(y)

    return max(jax.tree.leaves(jax.tree.map(leaf, tree, reference)))
