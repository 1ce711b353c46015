"""Whether what another library returns is what ours does."""

import jax
import jax.numpy as jnp

LARGEST_DIFFERENCE = 0.02  # of two results, in the 2-norm; bfloat16 gives about 0.004


def as_rows(result, shape: tuple[int, ...]) -> list[jax.Array]:
    """An output, or the gradients of q, k and v, of any library, the first of several, as ``[T, N, H]``.

    Args:
        result: of JAX, in that order; or of PyTorch, ``[1, N, T, H]``.
        shape: of q.
    """
    if isinstance(result, list):
        result = result[0]
    parts = result if isinstance(result, tuple) else (result,)
    return [_rows(part).reshape(shape[0], -1, shape[2]) for part in parts]


def _rows(part) -> jax.Array:
    if isinstance(part, jax.Array):
        return part
    return jnp.from_dlpack(part[0].transpose(0, 1).contiguous())


def refuse_difference(which: str, found: list[jax.Array], expected: list[jax.Array]) -> None:
    """Raises where results of a pass are too far apart."""
    for part, other in zip(found, expected, strict=True):
        error = difference(part, other)
        if not error <= LARGEST_DIFFERENCE:  # nor where either holds NaN
            raise ValueError(f"{which}: differs from ours by {error:.3g}")


@jax.jit
def difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Distance of two arrays over the length of the second, both in the 2-norm."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())
