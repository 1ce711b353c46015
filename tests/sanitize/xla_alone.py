"""Attention's program with XLA's own operations in place of the custom calls: what sanitizers say without us.

    compute-sanitizer --tool initcheck python tests/sanitize/xla_alone.py

Nothing of magi_jax is imported. Results are compared with NumPy's; what is reported all the same is not
true. Run it several times: reports come in some processes and not in others.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Queries, keys, and (N, K, H).
SHAPES = ((311, 311, (4, 2, 64)), (131, 601, (2, 1, 128)), (523, 97, (4, 1, 128)))
TABLES = ((128, 6), (4,), (128, 6), (512,), (3,), (4,), (128, 6), (512,), (3,))
apart = jax.lax.optimization_barrier


@jax.jit
def compute(q, k, v, dout, dlse, tables):
    """Results and gradients of the right shapes and dtypes, with `delta` as the package makes it."""
    unused = sum(jnp.sum(table) for table in tables) * 0
    out, lse = apart((q * 2, jnp.sum(q.astype(jnp.float32), axis=-1) + unused))
    delta = apart(jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)) - dlse
    dq = q.astype(jnp.float32) * delta[..., None]
    dq, dk, dv = apart((dq, k * 2 + delta[0, 0].astype(k.dtype), v * 3))
    return out, lse, dq.astype(q.dtype), dk, dv


def main() -> None:
    """Runs a program for each shape."""
    for q_len, k_len, (heads, kv_heads, dim) in SHAPES:
        rng = np.random.default_rng(5)
        sizes = ((q_len, heads), (k_len, kv_heads), (k_len, kv_heads), (q_len, heads))
        tensors = [
            jnp.asarray(rng.standard_normal((*size, dim), np.float32), jnp.bfloat16)
            for size in sizes
        ]
        dlse = rng.standard_normal((q_len, heads), np.float32)
        tables = [np.zeros(shape, np.int32) for shape in TABLES]
        out, _, dq, _, _ = jax.block_until_ready(compute(*tensors, dlse, tables))
        q, dout = (np.asarray(tensors[i], np.float32) for i in (0, 3))
        delta = (dout * np.asarray(out, np.float32)).sum(-1) - dlse
        expected = q * delta[..., None]
        error = np.abs(np.asarray(dq, np.float32) - expected).max() / np.abs(expected).max()
        assert error < 0.02, error
    print("right")


if __name__ == "__main__":
    main()
