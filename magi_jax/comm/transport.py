"""What a transport is: three functions that move rows, without derivatives or checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from magi_jax.plan import CommMeta

Leaves = Sequence[jax.Array]


@dataclass(frozen=True)
class Transport:
    """A way to move rows between the ranks of a manual mesh axis.

    Each function gets ``comm`` without its ``[cp]`` axis and the name of the axis. ``rows`` stands
    for the leading axis; leaves may have different trailing axes and dtypes.

    Attributes:
        name: what callers say to choose it.
        cast: ``(leaves [src_rows, ...], comm, axis_name) -> leaves [dst_rows, ...]``; zeros in rows
            that nobody sends.
        reduce_sum: ``(leaves [dst_rows, ...], comm, axis_name, wire_dtype) -> leaves [src_rows,
            ...]`` in `sum_dtype`; zeros in rows that nobody returns.
        reduce_lse: ``(out [dst_rows, N, Hv], lse [dst_rows, N], comm, axis_name, wire_dtype) ->
            (out [src_rows, N, Hv], lse [src_rows, N])`` in `sum_dtype`; ``(0, -inf)`` in rows that
            nobody returns.
        is_custom_call: whether calls are custom calls, which XLA runs beside computation only where
            it is told to; it does so with collectives of its own by itself.
    """

    name: str
    cast: Callable[[Leaves, CommMeta, str], list[jax.Array]]
    reduce_sum: Callable[[Leaves, CommMeta, str, Any], list[jax.Array]]
    reduce_lse: Callable[[jax.Array, jax.Array, CommMeta, str, Any], tuple[jax.Array, jax.Array]]
    is_custom_call: bool = False


def sum_dtype(dtype: Any) -> jnp.dtype:
    """Dtype of sums: at least float32; integers stay as they are, and so do booleans (or'ed)."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(dtype)
    return jnp.promote_types(dtype, jnp.float32)
