"""Batches of sequences, brought to the one-sequence layout of `Stages`.

Sequences that share a plan become more heads: ``[B, T, N, H]`` is ``[T, B * N, H]``, and head
``b * N + n`` still reads kv head ``b * K + n // (N // K)``. One kernel call and one transfer then
serve the batch. Sequences with plans of their own (a stacked plan) take turns.
"""

import jax
import jax.numpy as jnp

from magi_jax.ops.lse import max_of_rows
from magi_jax.parallel.region import in_turns
from magi_jax.parallel.stages import Stages
from magi_jax.plan import AttentionPlan


def forward(stages: Stages, operands, plan: AttentionPlan):
    """`Stages.forward` on local ``[T, N, H]`` or ``[B, T, N, H]``; ``plan`` still has its ranks."""
    q, k, v, sinks = operands
    if _is_empty(q):
        out = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        lse = jnp.zeros(q.shape[:3], jnp.float32)
        no_logits = jnp.full(q.shape[2], -jnp.inf, jnp.float32)
        return out, lse, (), no_logits if stages.with_max_logits else None
    if plan.positions.ndim == 3:
        *results, max_logits = in_turns(
            lambda arrays, part: _forward(stages, (*arrays, sinks), part), (q, k, v), plan
        )
        return *results, None if max_logits is None else max_of_rows(max_logits)
    if q.ndim == 3:
        return _forward(stages, operands, plan)
    batch = q.shape[0]
    out, lse, kept, max_logits = _forward(stages, _fold_operands(operands), plan)
    if max_logits is not None:
        max_logits = max_of_rows(max_logits.reshape(batch, -1))
    return _unfold(out, batch), _unfold(lse, batch), kept, max_logits


def backward(stages: Stages, cotangents, results, operands, plan: AttentionPlan):
    """`Stages.backward` on the same arrays."""
    q, k, v, sinks = operands
    if _is_empty(q):
        return jax.tree.map(jnp.zeros_like, operands)
    if plan.positions.ndim == 3:

        def one(arrays, part):
            cotangents, results, (q, k, v) = arrays
            return _backward(stages, cotangents, results, (q, k, v, sinks), part)

        *gradients, dsinks = in_turns(one, (cotangents, results, (q, k, v)), plan)
        return *gradients, None if sinks is None else dsinks.sum(0)
    if q.ndim == 3:
        return _backward(stages, cotangents, results, operands, plan)
    batch = q.shape[0]
    cotangents = tuple(map(_fold, cotangents))
    results = (*map(_fold, results[:2]), results[2])
    *gradients, dsinks = _backward(stages, cotangents, results, _fold_operands(operands), plan)
    if sinks is not None:
        dsinks = dsinks.reshape(*sinks.shape[:-1], batch, -1).sum(-2)
    return *(_unfold(g, batch) for g in gradients), dsinks


def _is_empty(q: jax.Array) -> bool:
    """Whether there is a batch without a sequence, of which no kernel could tell the heads."""
    return q.ndim == 4 and q.shape[0] == 0


def _forward(stages, operands, plan):
    return stages.forward(operands, plan.local(jax.lax.axis_index(stages.axis_name)))


def _backward(stages, cotangents, results, operands, plan):
    part = plan.local(jax.lax.axis_index(stages.axis_name))
    return stages.backward(cotangents, results, operands, part)


def _fold(x: jax.Array) -> jax.Array:
    """``[B, T, N, ...]`` to ``[T, B * N, ...]``."""
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _fold_operands(operands):
    """``q, k, v`` folded, and sinks ``[..., N]`` repeated to ``[..., B * N]``."""
    q, k, v, sinks = operands
    sinks = None if sinks is None else jnp.tile(sinks, q.shape[0])
    return _fold(q), _fold(k), _fold(v), sinks


def _unfold(x: jax.Array, batch: int) -> jax.Array:
    """``[T, B * N, ...]`` to ``[B, T, N, ...]``."""
    x = x.reshape(x.shape[0], batch, x.shape[1] // batch, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)
