"""`dot_product_attention`: the signature and meaning of jax.nn's, through masks of band slices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from magi_jax import masks
from magi_jax.masks import AttnMask
from magi_jax.ops.api import flex_flash_attention
from magi_jax.ops.base import Implementation


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | Implementation | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax.nn.dot_product_attention`, exact, at the cost of what the mask leaves visible.

    Masks and lengths become part of the program, so they must be known when it is traced: NumPy
    arrays, or device arrays outside of jit. Where they change from step to step, hand
    `flex_flash_attention` a `slice_table` as an argument.

    Two things are other than in jax.nn: a query that sees no key gives 0 and a log-sum-exp of -inf,
    not the mean of all values; and the log-sum-exp is float32 and differentiable.

    Args:
        query: ``[B, T, N, H]`` or ``[T, N, H]``.
        key: ``[B, S, K, H]`` or ``[S, K, H]``.
        value: ``[B, S, K, Hv]`` or ``[S, K, Hv]``.
        bias: refused.
        mask: bool, broadcastable to ``[B, N, T, S]`` or ``[N, T, S]`` and the same for all heads; True
            where a query sees a key.
        scale: factor of the logits; None is ``H ** -0.5``.
        is_causal: query t sees keys up to t (aligned top-left).
        query_seq_lengths: ``[B]``, queries of each sequence; later ones see nothing.
        key_value_seq_lengths: ``[B]``, keys of each sequence; later ones are not seen.
        local_window_size: ``(left, right)``, keys ``t - left .. t + right``, None = unbounded; one integer
            stands for both.
        implementation: name of a kernel of this package; None chooses by platform.
        return_residual: whether to return the log-sum-exp too, ``[B, T, N]`` or ``[T, N]``.

    Returns:
        As `flex_flash_attention`.

    Raises:
        NotImplementedError: a bias, a mask that differs between heads, or a mask or lengths that are
            traced.
        TypeError: ``mask`` is an `AttnMask`.
        ValueError: shapes, dtypes or options do not fit each other.
    """
    if bias is not None:
        raise NotImplementedError(
            "dot_product_attention does not take bias: a dense bias needs T x S memory; leave it out"
        )
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim not in (3, 4) or x.ndim != query.ndim:
            raise ValueError(
                f"{name} must have 3 or 4 dimensions, [B, T, N, H] or [T, N, H], as query does; got"
                f" {x.shape} and query {query.shape}"
            )
    batch, q_len, k_len = query.shape[0] if query.ndim == 4 else 1, query.shape[-3], key.shape[-3]
    if local_window_size is None or isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    band = masks.local(q_len, k_len, window=local_window_size, causal=is_causal)
    attend: Callable[..., Any] = functools.partial(
        flex_flash_attention,
        scale=scale,
        implementation=implementation,
        return_residual=return_residual,
    )
    each = [band]
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        q_lengths = _lengths("query_seq_lengths", query_seq_lengths, batch, q_len)
        k_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch, k_len)
        pairs = zip(q_lengths, k_lengths, strict=True)
        each = [band & _rectangle(q_len, k_len, *both) for both in pairs]
    if mask is not None:
        dense = _dense(mask, batch, query.shape[-2], q_len, k_len)
        each = [
            each[i % len(each)] & masks.from_dense(dense[i % len(dense)])
            for i in range(max(len(each), len(dense)) if batch else 0)
        ]
    if not batch or len(each) == 1:
        return attend(query, key, value, each[0] if batch else band)
    # Sequences with masks of their own are documents of one long sequence.
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    results = attend(q, k, v, masks.concatenate(each))
    return jax.tree.map(lambda x: x.reshape(*query.shape[:-2], *x.shape[1:]), results)


def _lengths(name: str, lengths: ArrayLike | None, batch: int, limit: int) -> list[int]:
    if lengths is None:
        return [limit] * batch
    values = _concrete(name, lengths, "magi_jax.masks.varlen(lengths)")
    if values.shape != (batch,) or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"{name} must be integers [{batch}], one for each sequence; got {values.dtype}"
            f" {list(values.shape)}"
        )
    outside = values[(values < 0) | (values > limit)]
    if len(outside):
        raise ValueError(f"{name} must lie in [0, {limit}]; got {outside[0]}")
    return values.tolist()


def _rectangle(q_len: int, k_len: int, queries: int, keys: int) -> AttnMask:
    ranges = [(0, queries)], [(0, keys)]
    return AttnMask.from_slices(*ranges, masks.MaskType.FULL, q_len=q_len, k_len=k_len)


def _dense(mask: ArrayLike, batch: int, num_heads: int, q_len: int, k_len: int) -> np.ndarray:
    """The mask as ``[B or 1, T, S]``."""
    if isinstance(mask, AttnMask):
        raise TypeError(
            "dot_product_attention takes a dense mask, as that of jax.nn does, got an AttnMask; give it to"
            " flex_flash_attention"
        )
    dense = _concrete("mask", mask, "magi_jax.masks.from_dense(mask) or a builder")
    shape = (batch, num_heads, q_len, k_len)
    lead = (1,) * (4 - dense.ndim) + dense.shape
    fits = len(lead) == 4 and all(n in (1, full) for n, full in zip(lead, shape, strict=True))
    if dense.dtype != bool or not fits:
        raise ValueError(
            f"mask must be bool and broadcastable to {list(shape)}; got {dense.dtype}"
            f" {list(dense.shape)}"
        )
    dense = dense.reshape(lead)
    if (dense != dense[:, :1]).any():
        raise NotImplementedError(
            "dot_product_attention does not take a mask that differs between heads: call it once for"
            " each group of heads that share one"
        )
    return np.broadcast_to(dense[:, 0], (lead[0], q_len, k_len))


def _concrete(name: str, value: ArrayLike, builder: str) -> np.ndarray:
    if isinstance(value, jax.core.Tracer):
        raise NotImplementedError(
            f"dot_product_attention does not take a traced {name}: make a mask of its values outside of"
            f" jit, with {builder}, and call flex_flash_attention with slice_table(mask), which may be"
            " an argument of the jitted function"
        )
    return np.asarray(value)
