"""Attention on one device: the public functions and their derivative."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from magi_jax import masks, mesh
from magi_jax.masks.attn_mask import MASKS_COME_FROM, AttnMask
from magi_jax.ops import checks
from magi_jax.ops.base import BackwardOperands, Implementation
from magi_jax.ops.head_groups import by_head_groups
from magi_jax.ops.implementations import get_implementation, platform_of
from magi_jax.ops.lse import add_sinks, max_of_rows, sinks_gradient
from magi_jax.ops.repeat_table import can_repeat, repeat_table
from magi_jax.plan import AttentionPlan, SliceTable, slice_table

Mask = AttnMask | SliceTable

# Name of `out` and `lse` for remat policies such as `jax.checkpoint_policies.save_only_these_names`.
CONTEXT_NAME = "context"


@dataclass(frozen=True)
class _Call:
    """What is static about a call."""

    implementation: Implementation
    scale: float
    logits_soft_cap: float
    with_max_logits: bool

    @property
    def options(self) -> dict[str, float]:
        return {"scale": self.scale, "logits_soft_cap": self.logits_soft_cap}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call, q, k, v, sinks, table):
    out, lse, *row_max = call.implementation.forward(
        q,
        k,
        v,
        table,
        out_dtype=q.dtype if sinks is None else jnp.float32,
        with_row_max=call.with_max_logits,
        **call.options,
    )
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse, max_of_rows(row_max[0]) if row_max else None


def _attention_forward(call, q, k, v, sinks, table):
    # A remat policy that saves these two needs no second forward pass.
    out, lse, max_logits = checkpoint_name(_attention(call, q, k, v, sinks, table), CONTEXT_NAME)
    return (out, lse, max_logits), (q, k, v, sinks, table, out, lse)


def _attention_backward(call, residuals, cotangents):
    q, k, v, sinks, table, out, lse = residuals
    dout, dlse, _ = cotangents  # the largest logits have no derivative
    # The derivative of lse by a logit is its softmax weight, so dlse joins the term of normalisation.
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
    operands = BackwardOperands(dout.astype(q.dtype), q, k, v, lse, delta)
    dq, dk, dv = call.implementation.backward(operands, table, dq_dtype=q.dtype, **call.options)
    dsinks = None if sinks is None else sinks_gradient(sinks, lse, delta).astype(sinks.dtype)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), dsinks, None


_attention.defvjp(_attention_forward, _attention_backward)


def flex_flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: Mask | Sequence[Mask],
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    return_max_logits: bool = False,
    implementation: str | Implementation | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Exact attention on one device for any mask that is a union of band slices.

    Time and memory grow with the area of the mask and with the inputs, never with T x S. Differentiable in
    q, k, v and sinks, through both results.

    Args:
        q: ``[*B, T, N, H]``, float32, bfloat16 or float16. All sequences of a batch share a mask of
            ``T`` queries; under one of ``B * T`` (`masks.concatenate` of one for each) they are a single
            packed stream. Under a shared `SliceTable` whose tiles do not divide T and S they are computed one
            after the other, else all at once.
        k: ``[*B, S, K, H]``, dtype of q; query head n reads kv head ``n // (N // K)``.
        v: ``[*B, S, K, Hv]``, dtype of q.
        mask: an `AttnMask`, which becomes part of the program; or a `SliceTable` (`plan.slice_table`),
            whose arrays may be arguments of it, so that a new mask of the same sizes compiles nothing.
            `block_sparse_table` makes one on the device. A sequence of G masks is for G equal groups of
            neighbouring kv heads and the query heads that read them.
        scale: factor of the logits; None is ``H ** -0.5``.
        logits_soft_cap: logits become ``cap * tanh(logits / cap)``; None for no cap.
        sinks: ``[N]``, or ``[X, N]`` for X of them: logits that join the softmax of every row of their
            head and have no value.
        deterministic: insist on equal bits for equal inputs, gradients included.
        return_residual: whether to return the log-sum-exp too.
        return_max_logits: whether to return the largest logits too.
        implementation: name of a kernel; None chooses by the platform of q, or where that is traced by the
            default one (`jax.default_device`).

    Returns:
        ``out [*B, T, N, Hv]`` in the dtype of q; rows that see no key are zero. With ``return_residual``
        also ``lse [*B, T, N]``, float32, natural log; -inf in rows that see no key and have no sinks.
        With ``return_max_logits`` then ``max_logits [N]``, float32: the largest logit of each head, after
        scale and cap, over all cells that the mask shows in any sequence (QK-clip reads it); -inf where it
        shows none. It is a statistic without a derivative.

    Raises:
        ValueError: shapes, dtypes, options or the mask do not fit each other.
        NotImplementedError: the implementation does not support the case.
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    sinks = None if sinks is None else jnp.asarray(sinks)
    chosen = get_implementation(
        implementation, deterministic=deterministic, platform=platform_of(q)
    )
    _check_batch(q, k, v)
    _check_sinks(sinks, q.shape[-2])
    call = _Call(chosen, *settled_logits(scale, logits_soft_cap, q.shape[-1]), return_max_logits)
    operands = (q, k, v, sinks)
    if isinstance(mask, list | tuple):
        results = by_head_groups(functools.partial(_attend, call), operands, mask)
    else:
        results = _attend(call, *operands, mask)
    wanted = (True, return_residual, return_max_logits)
    kept: list[Any] = [x for x, is_kept in zip(results, wanted, strict=True) if is_kept]
    return tuple(kept) if len(kept) > 1 else kept[0]


def _attend(call: _Call, q, k, v, sinks, mask) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """``out``, ``lse`` and the largest logits of a batch under one mask."""
    lead = q.shape[:-3]
    size = math.prod(lead)
    # An exported program may leave it open; then sequences take turns.
    is_batch = isinstance(size, int) and size > 1
    rows = (q.shape[-3], k.shape[-3])
    if is_batch and isinstance(mask, AttnMask) and (mask.q_len, mask.k_len) == rows:
        # One call for all of them, and one order of tiles.
        mask = masks.concatenate([mask] * size)
    table = _table(mask)
    if is_batch and (table.q_len, table.k_len) == rows and can_repeat(table):
        table = repeat_table(table, size)
    operands = mesh.unify_varying(q, k, v, sinks, table)
    if not lead:
        return _checked_attention(call, *operands)
    if is_batch and (table.q_len, table.k_len) == (size * rows[0], size * rows[1]):
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in operands[:3])
        out, lse, max_logits = _checked_attention(call, q, k, v, *operands[3:])
        return (
            out.reshape(*lead, rows[0], *out.shape[1:]),
            lse.reshape(*lead, rows[0], q.shape[1]),
            max_logits,
        )
    q, k, v = (x.reshape(size, *x.shape[-3:]) for x in operands[:3])
    attend = jax.vmap(functools.partial(_checked_attention, call), in_axes=(0, 0, 0, None, None))
    out, lse, max_logits = attend(q, k, v, *operands[3:])
    out, lse = (x.reshape(*lead, *x.shape[1:]) for x in (out, lse))
    return out, lse, max_of_rows(max_logits) if call.with_max_logits else None


def _checked_attention(call, q, k, v, sinks, table):
    checks.check_operands(q, k, v, table)
    return _attention(call, q, k, v, sinks, table)


def _table(mask: Mask) -> SliceTable:
    if isinstance(mask, AttnMask):
        return slice_table(mask)
    if isinstance(mask, SliceTable):
        checks.check_single(mask)
        return mask
    if callable(mask):
        instead = (
            "a function of positions would be called for each of T x S cells; say with magi_jax.masks which"
            " bands it shows, or give a mask of whole blocks to magi_jax.block_sparse_table"
        )
    elif isinstance(mask, AttentionPlan):
        instead = "plans are for dist_attention"
    else:
        instead = MASKS_COME_FROM
    raise TypeError(
        f"mask must be an AttnMask or a SliceTable, got {type(mask).__name__}; {instead}"
    )


def _check_batch(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Refuses q, k and v without the same leading axes."""
    if min(q.ndim, k.ndim, v.ndim) < 3:
        raise ValueError(
            "expected q [*B, T, N, H], k [*B, S, K, H], v [*B, S, K, Hv];"
            f" got {q.shape=} {k.shape=} {v.shape=}"
        )
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"q, k and v must have the same leading axes; got {q.shape=} {k.shape=} {v.shape=}"
        )


def _check_sinks(sinks: jax.Array | None, num_heads: int) -> None:
    if sinks is None:
        return
    if sinks.ndim not in (1, 2) or sinks.shape[-1] != num_heads:
        raise ValueError(
            f"sinks must be [N] or [X, N] with N = {num_heads} heads; got {sinks.shape=}"
        )
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"sinks must be floating; got {sinks.dtype}")


def settled_logits(
    scale: float | None, logits_soft_cap: float | None, head_dim: int
) -> tuple[float, float]:
    """Scale and cap of the logits as a call has them: defaults taken, and 0 for no cap.

    Raises:
        TypeError: one of them is traced, or no number.
        ValueError: one of them makes no logits.
    """
    scale = head_dim**-0.5 if scale is None else _known("scale", scale, "multiply q by it")
    cap = 0.0
    if logits_soft_cap is not None:
        cap = _known("logits_soft_cap", logits_soft_cap, "make it a static argument")
        if not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"logits_soft_cap must be positive, or None; got {cap}")
    checks.check_options(scale, cap)
    return scale, cap


def _known(name: str, value: float, instead: str) -> float:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} becomes part of the program and must be known while tracing, got a traced"
            f" {jax.typeof(value)}; {instead} instead"
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, or None; got {value!r}") from error
