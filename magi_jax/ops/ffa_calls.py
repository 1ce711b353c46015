"""The custom calls of attention: operands, results and attributes, alike on all platforms."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax import mesh
from magi_jax.ops import base, ffi
from magi_jax.plan import SliceTable

FORWARD = "magi_jax_ffa_forward"
FORWARD_ACCUMULATE = "magi_jax_ffa_forward_accumulate"
BACKWARD = "magi_jax_ffa_backward"
BACKWARD_ACCUMULATE = "magi_jax_ffa_backward_accumulate"


class Kernel(NamedTuple):
    """Which family of targets a call goes to.

    Attributes:
        suffix: what the names of its targets end with.
        scratch: shape and dtype of the further results that it works in.
        rounds_dq: it gives dq in the dtype of q itself, where that is wanted.
    """

    suffix: str = ""
    scratch: tuple[tuple[tuple[int, ...], Any], ...] = ()
    rounds_dq: bool = False


def forward(
    kernel: Kernel,
    tensors: tuple[jax.Array, jax.Array, jax.Array],
    table: SliceTable,
    out_dtype: Any,
    accumulate: tuple[jax.Array, jax.Array] | None,
    with_row_max: bool,
    **options: float,
) -> tuple[jax.Array, ...]:
    """Calls a forward target with ``q, k, v`` that are checked; see `Implementation.forward`."""
    q, k, v = tensors
    operands = mesh.unify_varying(q, k, v, table.slices, *table.by_query, *(accumulate or ()))
    # What there is already is added to in place.
    aliases = None if accumulate is None else {len(operands) - 2: 0, len(operands) - 1: 1}
    rows, num_heads = q.shape[:2]
    results = (
        ((rows, num_heads, v.shape[2]), out_dtype),
        ((rows, num_heads), jnp.float32),
        # Without rows where it is not asked for, which costs nothing.
        ((rows if with_row_max else 0, num_heads), jnp.float32),
    )
    target = FORWARD if accumulate is None else FORWARD_ACCUMULATE
    out, lse, row_max, *_ = _call(target, kernel, operands, results, aliases, table, options)
    return (out, lse, row_max) if with_row_max else (out, lse)


def backward(
    kernel: Kernel,
    tensors: base.BackwardOperands,
    table: SliceTable,
    dtypes: tuple[Any, Any],
    accumulate: jax.Array | None,
    **options: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Calls a backward target; see `Implementation.backward`.

    ``dtypes`` are those of dq, and of dk and dv.
    """
    kept = None
    if accumulate is not None and accumulate.dtype != jnp.float32 and not kernel.rounds_dq:
        accumulate, kept = None, accumulate
    dq, dk, dv, *_ = backward_results(kernel, tensors, table, dtypes, accumulate, **options)
    dq = dq.astype(dtypes[0])
    return dq if kept is None else base.write_tiles(dq, kept, table), dk, dv


def backward_results(
    kernel: Kernel,
    tensors: tuple[jax.Array, ...],
    table: SliceTable,
    dtypes: tuple[Any, Any],
    accumulate: jax.Array | None,
    **options: float,
) -> list[jax.Array]:
    """All results of a backward target, scratch too; dq in float32 where the kernel does not round it."""
    _, q, k, v, _, _ = tensors
    added_to = () if accumulate is None else (accumulate,)
    operands = mesh.unify_varying(*tensors, table.slices, *table.by_query, *table.by_key, *added_to)
    dq_dtype, dkv_dtype = dtypes
    given = dq_dtype if kernel.rounds_dq else jnp.float32
    results = ((q.shape, given), (k.shape, dkv_dtype), (v.shape, dkv_dtype))
    target = BACKWARD if accumulate is None else BACKWARD_ACCUMULATE
    aliases = None if accumulate is None else {len(operands) - 1: 0}
    return _call(target, kernel, operands, results, aliases, table, options)


def _call(target, kernel, operands, results, aliases, table, options):
    ffi.load()
    call = jax.ffi.ffi_call(
        ffi.target(target + kernel.suffix),
        [
            mesh.result_type(shape, dtype, operands[0])
            for shape, dtype in (*results, *kernel.scratch)
        ],
        # One after the other: each fills the device, and nothing has to be copied together.
        vmap_method="sequential",
        input_output_aliases=aliases,
    )
    attributes = {name: np.float32(value) for name, value in options.items()}
    return call(*operands, **attributes, tile_size=np.int32(table.tile_size))
