"""Attention in plain JAX, dense and short: runs anywhere and says what the kernels must compute."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from magi_jax import mesh
from magi_jax.masks import bands
from magi_jax.ops import base
from magi_jax.ops.lse import merge
from magi_jax.plan import SliceTable

# Largest array of logits, N x T x S elements: 1 GiB in float32, and several of them exist at a time.
MAX_LOGITS = 2**28


class _Logits(NamedTuple):
    q: jax.Array  # [T, N, H] float32
    k: jax.Array  # [S, N, H] float32, repeated to N heads
    v: jax.Array  # [S, N, Hv] float32
    visible: jax.Array  # [T, S]
    capped: jax.Array  # [N, T, S]


@dataclass(frozen=True)
class ReferenceImplementation(base.Implementation):
    """Dense attention with ``N * T * S`` logits in memory, float32 arithmetic, any platform."""

    @property
    def name(self) -> str:
        """``"reference"``."""
        return "reference"

    @property
    def is_deterministic(self) -> bool:
        """True."""
        return True

    def _forward(self, operands, table, options, out_dtype, accumulate, with_row_max):
        q, k, v = operands
        _check_size(q, k)
        x = _logits(q, k, v, table, **options)
        masked = jnp.where(x.visible, x.capped, -jnp.inf)
        top = jnp.max(masked, axis=-1, keepdims=True, initial=-jnp.inf)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        weights = jnp.exp(masked - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        empty = total == 0.0
        weights = weights / jnp.where(empty, 1.0, total)
        lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))[..., 0].T
        out = _seen_product("nts,snh->tnh", weights, x.v, x.visible)
        if accumulate is not None:
            out_before, lse_before = accumulate
            out, lse = merge(out_before, lse_before, out, lse)
        results = (out.astype(out_dtype), lse)
        if not with_row_max:
            return results
        return *results, jnp.max(masked, axis=-1, initial=-jnp.inf).T

    def _backward(self, operands, table, options, dtypes, accumulate):
        dout, q, k, v, lse, delta = operands
        dq_dtype, dkv_dtype = dtypes
        scale, logits_soft_cap = options["scale"], options["logits_soft_cap"]
        _check_size(q, k)
        x = _logits(q, k, v, table, **options)
        dout = dout.astype(jnp.float32)
        lse, delta = lse.T[..., None], delta.T[..., None]
        seen = x.visible[None] & (lse > -jnp.inf)
        weights = jnp.where(seen, jnp.exp(x.capped - lse), 0.0)
        dlogits = weights * (_product("tnh,snh->nts", dout, x.v) - delta)
        if logits_soft_cap:
            dlogits = dlogits * (1.0 - (x.capped / logits_soft_cap) ** 2)
        dlogits = jnp.where(seen, scale * dlogits, 0.0)
        dq = _seen_product("nts,snh->tnh", dlogits, x.k, x.visible)
        dk = _seen_product("nts,tnh->snh", dlogits, x.q, x.visible)
        dv = _seen_product("nts,tnh->snh", weights, dout, x.visible)
        dk, dv = (_sum_groups(d, k.shape[1]).astype(dkv_dtype) for d in (dk, dv))
        if accumulate is None:
            return dq.astype(dq_dtype), dk, dv
        if dq_dtype == jnp.float32:
            return accumulate + dq, dk, dv
        return base.write_tiles(dq.astype(dq_dtype), accumulate, table), dk, dv


def _check_size(q, k) -> None:
    size = q.shape[1] * q.shape[0] * k.shape[0]
    if size > MAX_LOGITS:
        raise NotImplementedError(
            f"the reference holds all {size} logits (N x T x S) and stops at {MAX_LOGITS}; use another"
            f" implementation for {q.shape=} {k.shape=}"
        )


def _logits(q, k, v, table, scale, logits_soft_cap) -> _Logits:
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    logits = scale * _product("tnh,snh->nts", q, k)
    if logits_soft_cap:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    return _Logits(q, k, v, dense_mask(table), logits)


def dense_mask(table: SliceTable) -> jax.Array:
    """Cells that a table shows, boolean ``[T, S]``; the table may be traced."""
    query = jnp.arange(table.q_len)[:, None]
    key = jnp.arange(table.k_len)[None, :]

    def add(visible, row):
        inside = (query >= row[bands.Q_START]) & (query < row[bands.Q_END])
        inside &= (key >= row[bands.K_START]) & (key < row[bands.K_END])
        inside &= (key - query >= row[bands.D_MIN]) & (key - query <= row[bands.D_MAX])
        return visible | inside, None

    rows = jnp.asarray(table.slices)
    nothing, rows = mesh.unify_varying(jnp.zeros((table.q_len, table.k_len), bool), rows)
    return jax.lax.scan(add, nothing, rows)[0]


def _product(expression: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(expression, a, b, precision=jax.lax.Precision.HIGHEST)


def _seen_product(
    expression: str, weights: jax.Array, rows: jax.Array, seen: jax.Array
) -> jax.Array:
    """Product of weights with rows of which infinities and NaN count only where they are seen.

    In a plain product a weight of zero turns them into NaN. What sees one of them becomes NaN.

    Args:
        expression: of the product.
        weights: ``[N, T, S]``.
        rows: ``[T, N, H]`` or ``[S, N, H]``.
        seen: ``[T, S]``.
    """
    finite = jnp.isfinite(rows)
    product = _product(expression, weights, jnp.where(finite, rows, 0.0))
    bad = _product(
        expression.replace("nts", "ts"), seen.astype(jnp.float32), (~finite).astype(jnp.float32)
    )
    return jnp.where(bad > 0.0, jnp.nan, product)


def _sum_groups(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """``[S, N, H]`` to ``[S, K, H]``."""
    length, num_heads, dim = x.shape
    return x.reshape(length, num_kv_heads, num_heads // num_kv_heads, dim).sum(axis=2)
