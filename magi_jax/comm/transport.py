"""What a transport is: three functions that move rows, without derivatives or checks."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from magi_jax.plan import CommMeta

Leaves = Sequence[jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Part:
    """A custom call that was started. None of its arrays may be touched before it is finished.

    Attributes:
        map: scratch of the call.
        results: its results, not yet there.
        held: its operands.
        pool: static; the symmetric memory that it uses.
    """

    map: jax.Array
    results: tuple[jax.Array, ...]
    held: tuple[jax.Array, ...]
    pool: int = dataclasses.field(metadata={"static": True})


class InFlight(NamedTuple):
    """What `Transport.start_cast` and `Transport.start_reduce_sum` return: a pytree.

    Attributes:
        leaves: results that are there already, of a transport that starts nothing by itself.
        parts: custom calls that run beside computation.
    """

    leaves: tuple[jax.Array, ...]
    parts: tuple[Part, ...] = ()


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
        start_cast, start_reduce_sum: as ``cast`` and ``reduce_sum``, for calls that run beside the
            computation that follows until `finish_call`; None for transports of XLA's own
            collectives, which it runs beside computation by itself. A cast is told, last, whether it is
            ``exposed``: whether what follows is short, so that attention soon waits for it; a reduce what its
            sums are added to, or None: arrays like its results, in whose place these come.
        finish_call: ``InFlight -> leaves``.
        keep: ``leaves -> leaves``, the same, none of which is dropped while one is read. A compiler drops
            the end of a call whose results nobody reads, not its start, for which computation waits: it
            would write to buffers that were given to others.
    """

    name: str
    cast: Callable[[Leaves, CommMeta, str], list[jax.Array]]
    reduce_sum: Callable[[Leaves, CommMeta, str, Any], list[jax.Array]]
    reduce_lse: Callable[[jax.Array, jax.Array, CommMeta, str, Any], tuple[jax.Array, jax.Array]]
    start_cast: Callable[[Leaves, CommMeta, str, bool], InFlight] | None = None
    start_reduce_sum: Callable[[Leaves, CommMeta, str, Any, Leaves | None], InFlight] | None = None
    finish_call: Callable[[InFlight], list[jax.Array]] | None = None
    keep: Callable[[Leaves], list[jax.Array]] | None = None


def sum_dtype(dtype: Any) -> jnp.dtype:
    """Dtype of sums: at least float32; integers stay as they are, and so do booleans (or'ed)."""
    dtype = jnp.dtype(dtype)
    # Not by promotion, which refuses 8-bit floats.
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else dtype
