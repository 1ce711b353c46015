"""The pieces that strategies are made of; all run inside a `shard_map` and have derivatives."""

import jax
import jax.numpy as jnp

from magi_jax.ops import flex_flash_attention
from magi_jax.ops.lse import merge
from magi_jax.plan.tables import SliceTable

KeysValues = tuple[jax.Array, jax.Array]


def to_heads(x: jax.Array, axis: str, size: int) -> jax.Array:
    """``[T, N, H]`` with all heads of a rank's rows to ``[size * T, max(N / size, 1), H]``: the rows of all.

    Where there are fewer heads than ranks, each head goes to several of them.
    """
    if size == 1:
        return x
    heads = x.shape[1]
    if heads % size and size % heads:
        raise ValueError(f"{heads} heads cannot be shared out among {size} ranks")
    if heads < size:
        x = jnp.repeat(x, size // heads, axis=1)
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True)


def to_rows(x: jax.Array, axis: str, size: int) -> jax.Array:
    """The inverse of `to_heads` where no head was repeated."""
    if size == 1:
        return x
    return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=1, tiled=True)


def rotate(keys_values: KeysValues, axis: str, size: int) -> KeysValues:
    """What the rank before on the ring holds."""
    if size == 1:
        return keys_values
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), keys_values)


def double_ring(
    q: jax.Array, keys_values: KeysValues, tables: SliceTable, axes: dict[str, int]
) -> jax.Array:
    """Attention while keys and values go round a ring, or round a ring of rings.

    Step ``outer * size of the inner ring + inner`` reads the keys of the rank that lies ``outer`` and
    ``inner`` places before on the two rings (LoongTrain, arXiv 2406.18485; with one ring, arXiv 2310.01889).

    Args:
        q: ``[T, N, H]``.
        keys_values: ``k [T, K, H]`` and ``v [T, K, Hv]`` of this rank.
        tables: leaves ``[steps, ...]``.
        axes: name and size of the outer and of the inner ring.
    """
    (outer_axis, outer), (inner_axis, inner) = axes.items()
    out = lse = None
    for outer_step in range(outer):
        # Sent on at once, so that the whole inner ring hides the slow link.
        following = rotate(keys_values, outer_axis, outer) if outer_step + 1 < outer else None
        for inner_step in range(inner):
            here = jax.tree.map(lambda leaf, s=outer_step * inner + inner_step: leaf[s], tables)
            part, part_lse = flex_flash_attention(q, *keys_values, here, return_residual=True)
            if out is None:
                out, lse = part.astype(jnp.float32), part_lse
            else:
                out, lse = merge(out, lse, part, part_lse)
            if inner_step + 1 < inner:
                keys_values = rotate(keys_values, inner_axis, inner)
        keys_values = following
    return out.astype(q.dtype)


@jax.custom_vjp
def rearrange(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows ``index`` of ``x``, zeros where it is -1; no row twice, so that derivatives are taken likewise.

    XLA would scatter them, which takes many times as long.

    Args:
        x: ``[S, N, H]``.
        index: ``[T]``.
        inverse: row of the result of each row of ``x``, -1 where it is not taken, ``[S]``.
    """
    del inverse
    return _take(x, index)


def _rearrange_forward(x: jax.Array, index: jax.Array, inverse: jax.Array):
    return _take(x, index), inverse


def _rearrange_backward(inverse: jax.Array, dy: jax.Array):
    return _take(dy, inverse), None, None


rearrange.defvjp(_rearrange_forward, _rearrange_backward)


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    kept = (rows >= 0).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(kept, x[jnp.maximum(rows, 0)], 0)
