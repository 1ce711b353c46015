"""What all implementations of attention on one device refuse: operands that do not fit each other."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.plan import SliceTable

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
# What float32 holds with full precision.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def check_operands(q: jax.Array, k: jax.Array, v: jax.Array, table: SliceTable) -> None:
    """Refuses operands that do not fit each other or the table; raises ValueError that names the values."""
    if q.ndim != 3 or k.ndim != 3 or v.ndim != 3:
        raise ValueError(
            f"expected q [T, N, H], k [S, K, H], v [S, K, Hv]; got {q.shape=} {k.shape=} {v.shape=}"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q and k must have one head dim; got {q.shape[2]} and {k.shape[2]} ({q.shape=} {k.shape=})"
        )
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must agree in length and heads; got {k.shape=} {v.shape=}")
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads, which is not a multiple of the {num_kv_heads} of k;"
            f" got {q.shape=} {k.shape=}"
        )
    if q.shape[2] == 0 or v.shape[2] == 0:
        raise ValueError(f"head dims must be positive; got {q.shape=} {v.shape=}")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.dtype.name not in SUPPORTED_DTYPES:
        raise ValueError(f"q must be one of {', '.join(SUPPORTED_DTYPES)}; got {q.dtype}")
    check_table(table, q.shape, k.shape)


def check_single(table: SliceTable) -> None:
    """Refuses a table with a leading axis, of ranks or of sequences."""
    if table.slices.ndim != 2:
        raise ValueError(
            "a slice table must be that of one rank and one mask, slices [A, 6]; got slices of shape"
            f" {table.slices.shape} (a rank's part is table.local(rank, cp_size); where each sequence has"
            " a table of its own, jax.vmap the call over arrays and tables)"
        )


def check_table(table: SliceTable, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    """Refuses a table that was made for other rows, or that still has a leading axis."""
    check_single(table)
    rows = (table.q_len, table.k_len)
    if rows != (q_shape[0], k_shape[0]):
        raise ValueError(
            f"the mask is for {rows[0]} queries and {rows[1]} keys, but q has {q_shape[0]} rows and k has"
            f" {k_shape[0]}{heads_first((q_shape, k_shape), rows)}"
        )


def heads_first(shapes: tuple[tuple[int, ...], ...], rows: tuple[int, ...]) -> str:
    """What to add to a message about wrong numbers of rows where operands seem to be ``[N, T, H]``."""
    is_swapped = all(shape[-2] == n for shape, n in zip(shapes, rows, strict=True))
    return "; rows come before heads here, [*B, T, N, H]: swap them" if is_swapped else ""


def check_options(scale: float, logits_soft_cap: float) -> None:
    """Refuses a scale or cap that no logits can be made with in float32."""
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}")
    if not math.isfinite(logits_soft_cap) or logits_soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be positive, or 0 for none; got {logits_soft_cap}")
    if abs(scale) > _LARGEST:
        raise ValueError(f"scale must fit in float32, up to {_LARGEST}; got {scale}")
    # A smaller cap would be rounded to 0, which means none.
    if logits_soft_cap and not _SMALLEST <= logits_soft_cap <= _LARGEST:
        raise ValueError(
            f"logits_soft_cap must fit in float32, from {_SMALLEST} to {_LARGEST}, or be 0 for"
            f" none; got {logits_soft_cap}"
        )


def check_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: SliceTable,
    options: dict[str, float],
    accumulate: tuple[jax.Array, jax.Array] | None,
    out_dtype: Any,
) -> jnp.dtype:
    """Refuses a forward call that no implementation takes; returns the dtype of ``out``."""
    check_operands(q, k, v, table)
    check_options(**options)
    if accumulate is None:
        return result_dtype(out_dtype, q, "out_dtype")
    return _check_accumulate(accumulate, q, v, out_dtype)


def _check_accumulate(
    accumulate: tuple[jax.Array, jax.Array], q: jax.Array, v: jax.Array, out_dtype: Any
) -> jnp.dtype:
    """Refuses results of another shape or dtype than those of this call; returns the dtype of ``out``."""
    out, lse = accumulate
    expected = (*q.shape[:2], v.shape[2])
    if out.shape != expected or lse.shape != q.shape[:2]:
        raise ValueError(
            f"accumulate must be (out {expected}, lse {q.shape[:2]}); got {out.shape} and {lse.shape}"
        )
    if out.dtype not in (q.dtype, jnp.float32) or lse.dtype != jnp.float32:
        raise ValueError(
            f"accumulate must be float32, out may have the dtype of q, {q.dtype}; got {out.dtype} and"
            f" {lse.dtype}"
        )
    if out_dtype is not None and jnp.dtype(out_dtype) != out.dtype:
        raise ValueError(
            f"what is added to accumulate has its dtype, {out.dtype}; got out_dtype={out_dtype}"
        )
    return out.dtype


def check_dq(dq_dtype: Any, accumulate: jax.Array | None, q: jax.Array) -> jnp.dtype:
    """Refuses a dq of another shape or dtype than that of this call; returns its dtype."""
    dtype = result_dtype(dq_dtype, q, "dq_dtype")
    if accumulate is None:
        return dtype
    if accumulate.shape != q.shape or accumulate.dtype not in (q.dtype, jnp.float32):
        raise ValueError(
            f"accumulate must be dq {q.shape} in float32 or {q.dtype}; got {accumulate.shape}"
            f" {accumulate.dtype}"
        )
    if dtype != accumulate.dtype:
        raise ValueError(
            f"dq has the dtype of accumulate, {accumulate.dtype}; got dq_dtype={dq_dtype}"
        )
    return dtype


def result_dtype(dtype: Any, operand: jax.Array, name: str) -> jnp.dtype:
    """Dtype of a result: that of ``operand`` by default; float32 is the only other one."""
    dtype = operand.dtype if dtype is None else jnp.dtype(dtype)
    if dtype not in (operand.dtype, jnp.float32):
        raise ValueError(
            f"{name} must be float32 or the dtype of the operand, {operand.dtype}; got {dtype}"
        )
    return dtype
