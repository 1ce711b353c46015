"""What every implementation of attention on one device offers."""

import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from magi_jax.ops.checks import check_dq, check_forward, check_operands, check_options, result_dtype
from magi_jax.plan import SliceTable


class BackwardOperands(NamedTuple):
    """What a backward pass reads, in the order of the custom calls.

    Attributes:
        dout: ``[T, N, Hv]``, cotangent of ``out``, dtype of q.
        q: ``[T, N, H]``.
        k: ``[S, K, H]``.
        v: ``[S, K, Hv]``.
        lse: ``[T, N]`` float32 of the final result, merged over all sets of keys.
        delta: ``[T, N]`` float32, ``sum(dout * out, -1) - dlse`` of the final result.
    """

    dout: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    lse: jax.Array
    delta: jax.Array


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
        dtype = check_forward(q, k, v, table, options, accumulate, out_dtype)
        return self._forward((q, k, v), table, options, dtype, accumulate, with_row_max)

    def backward(
        self,
        operands: BackwardOperands,
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
            operands: what is read.
            table: the mask, in coordinates of q and k.
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
        _, q, k, v, _, _ = operands
        check_operands(q, k, v, table)
        check_options(scale, logits_soft_cap)
        dtypes = check_dq(dq_dtype, accumulate, q), result_dtype(dkv_dtype, k, "dkv_dtype")
        options = {"scale": scale, "logits_soft_cap": logits_soft_cap}
        return self._backward(operands, table, options, dtypes, accumulate)

    @abc.abstractmethod
    def _forward(
        self,
        operands: tuple[jax.Array, jax.Array, jax.Array],
        table: SliceTable,
        options: dict[str, float],
        out_dtype: jnp.dtype,
        accumulate: tuple[jax.Array, jax.Array] | None,
        with_row_max: bool,
    ) -> tuple[jax.Array, ...]:
        """`forward` of operands that fit, ``q, k, v``; ``scale`` and ``logits_soft_cap`` are options."""

    @abc.abstractmethod
    def _backward(
        self,
        operands: BackwardOperands,
        table: SliceTable,
        options: dict[str, float],
        dtypes: tuple[jnp.dtype, jnp.dtype],
        accumulate: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`backward` of operands that fit; the dtypes are those of dq, and of dk and dv."""


def write_tiles(dq: jax.Array, accumulate: jax.Array, table: SliceTable) -> jax.Array:
    """Puts rows of query tiles that see a key into the gradient of other calls, ``[T, N, H]``."""
    ptr = jnp.asarray(table.by_query.ptr)
    rows = jnp.repeat(ptr[1:] > ptr[:-1], table.tile_size, total_repeat_length=dq.shape[0])
    return jnp.where(rows[:, None, None], dq, accumulate)
