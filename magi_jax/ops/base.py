"""What every implementation of attention on one device offers, and the checks that they share."""

import abc
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.plan import SliceTable

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
# What float32 holds with full precision.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Implementation(abc.ABC):
    """Attention on one device, as a pair of functions without derivatives. Hashable.

    Shapes: ``q [T, N, H]``, ``k [S, K, H]``, ``v [S, K, Hv]``, ``out [T, N, Hv]``, ``lse [T, N]`` float32
    natural log. Rows that see no key have ``out = 0`` and ``lse = -inf``. Logits are ``scale * q.k``, then
    ``cap * tanh(logits / cap)`` where ``logits_soft_cap`` is not 0. ``table`` may be traced.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """How callers ask for it."""

    @property
    @abc.abstractmethod
    def is_deterministic(self) -> bool:
        """Whether equal inputs give equal bits, gradients included."""

    def forward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        table: SliceTable,
        *,
        scale: float,
        logits_soft_cap: float,
        accumulate: tuple[jax.Array, jax.Array] | None = None,
        out_dtype: Any = None,
        with_row_max: bool = False,
    ) -> tuple[jax.Array, ...]:
        """Attention over the keys that the table shows.

        Args:
            q: ``[T, N, H]``.
            k: ``[S, K, H]``, dtype of q.
            v: ``[S, K, Hv]``, dtype of q.
            table: the mask, in coordinates of q and k.
            scale: factor of the logits.
            logits_soft_cap: cap of the logits, 0 for none.
            accumulate: ``(out, lse)`` of other calls to add to. Tiles of queries that see no key here stay
                as they are. In float32 results are merged; ``out`` may have the dtype of q where rows of
                all other tiles have seen no key before, so that there is nothing to merge.
            out_dtype: float32 or the dtype of q, which is the default; with ``accumulate`` the dtype of
                its ``out``.
            with_row_max: whether to return the largest logits too.

        Returns:
            ``out [T, N, Hv]`` and ``lse [T, N]``; with ``with_row_max`` also ``row_max [T, N]``
            float32, the largest logit (after the cap) among the keys of this call that a row sees,
            -inf where it sees none.

        Raises:
            ValueError: operands that do not fit each other.
            NotImplementedError: what this implementation does not support, with the reason.
        """
        options = {"scale": scale, "logits_soft_cap": logits_soft_cap}
        dtype = _check_forward(q, k, v, table, options, accumulate, out_dtype)
        return self._forward((q, k, v), table, options, dtype, accumulate, with_row_max)

    def backward(
        self,
        dout: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        lse: jax.Array,
        delta: jax.Array,
        table: SliceTable,
        *,
        scale: float,
        logits_soft_cap: float,
        dkv_dtype: Any = None,
        dq_dtype: Any = jnp.float32,
        accumulate: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients for the keys that the table shows.

        Args:
            dout: ``[T, N, Hv]``, cotangent of ``out``, dtype of q.
            q: ``[T, N, H]``.
            k: ``[S, K, H]``.
            v: ``[S, K, Hv]``.
            lse: ``[T, N]`` of the final result, merged over all sets of keys.
            delta: ``[T, N]`` float32, ``sum(dout * out, -1) - dlse`` of the final result.
            table: the mask.
            scale: as in `forward`.
            logits_soft_cap: as in `forward`.
            dkv_dtype: float32 or the dtype of k, which is the default.
            dq_dtype: float32 or the dtype of q; with ``accumulate`` its dtype.
            accumulate: ``dq [T, N, H]`` of other calls. In float32 it is added to. In a shorter dtype of q it
                is what calls for other tiles of queries gave: tiles that see no key here keep it, all rows
                of the others are overwritten, so nothing is rounded twice.

        Returns:
            ``dq [T, N, H]``, ``dk [S, K, H]`` and ``dv [S, K, Hv]``.

        Raises:
            ValueError: operands that do not fit each other.
            NotImplementedError: what this implementation does not support, with the reason.
        """
        check_operands(q, k, v, table)
        check_options(scale, logits_soft_cap)
        dtypes = _check_dq(dq_dtype, accumulate, q), _result_dtype(dkv_dtype, k, "dkv_dtype")
        options = {"scale": scale, "logits_soft_cap": logits_soft_cap}
        return self._backward((dout, q, k, v, lse, delta), table, options, dtypes, accumulate)

    @abc.abstractmethod
    def _forward(
        self,
        tensors: tuple[jax.Array, jax.Array, jax.Array],
        table: SliceTable,
        options: dict[str, float],
        out_dtype: jnp.dtype,
        accumulate: tuple[jax.Array, jax.Array] | None,
        with_row_max: bool,
    ) -> tuple[jax.Array, ...]:
        """`forward` of operands that fit: ``q, k, v``; ``scale`` and ``logits_soft_cap`` are options."""

    @abc.abstractmethod
    def _backward(
        self,
        tensors: tuple[jax.Array, ...],
        table: SliceTable,
        options: dict[str, float],
        dtypes: tuple[jnp.dtype, jnp.dtype],
        accumulate: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`backward` of operands that fit: ``dout, q, k, v, lse, delta``; dtypes of dq, and of dk and dv."""


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


def _check_forward(
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
        return _result_dtype(out_dtype, q, "out_dtype")
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


def _check_dq(dq_dtype: Any, accumulate: jax.Array | None, q: jax.Array) -> jnp.dtype:
    """Refuses a dq of another shape or dtype than that of this call; returns its dtype."""
    dtype = _result_dtype(dq_dtype, q, "dq_dtype")
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


def write_tiles(dq: jax.Array, accumulate: jax.Array, table: SliceTable) -> jax.Array:
    """Puts rows of query tiles that see a key into the gradient of other calls, ``[T, N, H]``."""
    ptr = jnp.asarray(table.by_query.ptr)
    rows = jnp.repeat(ptr[1:] > ptr[:-1], table.tile_size, total_repeat_length=dq.shape[0])
    return jnp.where(rows[:, None, None], dq, accumulate)


def _result_dtype(dtype: Any, operand: jax.Array, name: str) -> jnp.dtype:
    """Dtype of a result: that of ``operand`` by default; float32 is the only other one."""
    dtype = operand.dtype if dtype is None else jnp.dtype(dtype)
    if dtype not in (operand.dtype, jnp.float32):
        raise ValueError(
            f"{name} must be float32 or the dtype of the operand, {operand.dtype}; got {dtype}"
        )
    return dtype
