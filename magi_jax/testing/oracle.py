"""Dense attention in NumPy float64, forward and backward, to compare implementations with.

Core layout: ``q [T, N, H]``, ``k [S, K, H]``, ``v [S, K, Hv]``; query head ``n`` reads kv head
``n // (N // K)``. Logits are ``x = scale * q.k``, then ``cap * tanh(x / cap)`` if capped. A query
that sees no key gives ``out = 0`` and ``lse = -inf``, or the logsumexp of its sinks.
"""

from typing import NamedTuple

import numpy as np


class Gradients(NamedTuple):
    """Cotangents in float64, shaped as what they belong to; ``dsinks`` is None without sinks."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dense_mask: np.ndarray,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of all queries over the keys that they see.

    Args:
        q: ``[T, N, H]``, any float dtype; computed in float64.
        k: ``[S, K, H]``.
        v: ``[S, K, Hv]``.
        dense_mask: boolean ``[T, S]``, True where a query sees a key.
        scale: factor of the logits; ``H ** -0.5`` if not given.
        logits_soft_cap: cap of the logits; None or 0 for none.
        sinks: logits that take part in every softmax of their head and have no value, ``[N]``, or
            ``[X, N]`` for X of them.

    Returns:
        ``out [T, N, Hv]`` and ``lse [T, N]`` (natural log), float64.
    """
    parts = _softmax(q, k, v, dense_mask, scale, logits_soft_cap, sinks)
    return _heads_last(parts.probs @ parts.v), parts.lse.T


def attention_grads(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dense_mask: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> Gradients:
    """Gradients of `attention` for cotangents ``dout [T, N, Hv]`` and ``dlse [T, N]`` (0 if None).

    The other arguments are those of `attention`. Where ``lse`` is ``-inf`` its cotangent has no
    effect.
    """
    parts = _softmax(q, k, v, dense_mask, scale, logits_soft_cap, sinks)
    group = parts.k.shape[0] // np.shape(k)[1]
    dout = _heads_first(dout)
    dlse = np.zeros_like(parts.lse) if dlse is None else np.asarray(dlse, np.float64).T

    # d lse / d logits is the softmax itself, so dlse joins the term that normalisation leaves.
    delta = (dout * (parts.probs @ parts.v)).sum(-1) - dlse
    dlogits = parts.probs * (dout @ parts.v.swapaxes(1, 2) - delta[..., None])
    if logits_soft_cap:
        dlogits *= 1 - (parts.logits / logits_soft_cap) ** 2
    dlogits *= parts.scale
    dsinks = None
    if sinks is not None:
        dsinks = -(parts.sink_probs * delta).sum(-1).reshape(np.shape(sinks))
    return Gradients(
        dq=_heads_last(dlogits @ parts.k),
        dk=_sum_groups(dlogits.swapaxes(1, 2) @ parts.q, group),
        dv=_sum_groups(parts.probs.swapaxes(1, 2) @ dout, group),
        dsinks=dsinks,
    )


class _Softmax(NamedTuple):
    """Heads first; k and v are repeated to N heads."""

    q: np.ndarray  # [N, T, H]
    k: np.ndarray  # [N, S, H]
    v: np.ndarray  # [N, S, Hv]
    logits: np.ndarray  # [N, T, S], capped, 0 where hidden
    probs: np.ndarray  # [N, T, S]
    sink_probs: np.ndarray  # [X, N, T]
    lse: np.ndarray  # [N, T]
    scale: float


def _softmax(q, k, v, dense_mask, scale, logits_soft_cap, sinks) -> _Softmax:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    _check(q, k, v, dense_mask, sinks)
    group = q.shape[1] // k.shape[1]
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    q, k, v = _heads_first(q), *(_heads_first(x.repeat(group, axis=1)) for x in (k, v))

    logits = scale * (q @ k.swapaxes(1, 2))
    if logits_soft_cap:
        logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
    sink_logits = np.zeros((0, q.shape[0])) if sinks is None else np.asarray(sinks, np.float64)
    sink_logits = sink_logits.reshape(-1, q.shape[0], 1)

    visible = np.where(dense_mask, logits, -np.inf)
    top = np.maximum(
        visible.max(axis=-1, initial=-np.inf), sink_logits.max(axis=0, initial=-np.inf)
    )
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(visible - top[..., None])
    sink_weights = np.exp(sink_logits - top)
    total = weights.sum(-1) + sink_weights.sum(0)
    nothing = total == 0
    safe = np.where(nothing, 1.0, total)
    lse = np.where(nothing, -np.inf, top + np.log(safe))
    probs, sink_probs = weights / safe[..., None], sink_weights / safe
    return _Softmax(q, k, v, np.where(dense_mask, logits, 0.0), probs, sink_probs, lse, scale)


def _check(q, k, v, dense_mask, sinks) -> None:
    if (
        q.ndim != 3
        or k.ndim != 3
        or v.ndim != 3
        or k.shape[:2] != v.shape[:2]
        or q.shape[2] != k.shape[2]
    ):
        raise ValueError(
            f"expected q [T, N, H], k [S, K, H], v [S, K, Hv]; got {q.shape} {k.shape} {v.shape}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, which is not a multiple of the {k.shape[1]} of k"
        )
    if np.shape(dense_mask) != (q.shape[0], k.shape[0]) or np.asarray(dense_mask).dtype != bool:
        raise ValueError(
            f"dense_mask must be bool [{q.shape[0]}, {k.shape[0]}]; "
            f"got {np.asarray(dense_mask).dtype} {np.shape(dense_mask)}"
        )
    if sinks is not None and (np.ndim(sinks) not in (1, 2) or np.shape(sinks)[-1] != q.shape[1]):
        raise ValueError(
            f"sinks must be [N] or [X, N] with N = {q.shape[1]}; got {np.shape(sinks)}"
        )


def _heads_first(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).swapaxes(0, 1)


def _heads_last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.swapaxes(0, 1))


def _sum_groups(x: np.ndarray, group: int) -> np.ndarray:
    """``[N, S, H]`` to ``[S, K, H]``."""
    heads, length, dim = x.shape
    return _heads_last(x.reshape(heads // group, group, length, dim).sum(1))
