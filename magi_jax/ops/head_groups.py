"""Attention whose groups of kv heads have masks of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Results = tuple[jax.Array | None, ...]  # out [..., N, Hv], then arrays [..., N] or None


def by_head_groups(
    attend: Callable[..., Results],
    operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    masks: Sequence[Any],
) -> Results:
    """``attend(q, k, v, sinks, mask)`` for each group of heads, joined along the heads.

    Args:
        attend: attention under one mask; its results have the heads on the last axis, but for the
            first, which has them before the last.
        operands: ``q [*B, T, N, H]``, ``k [*B, S, K, H]``, ``v [*B, S, K, Hv]`` and sinks
            ``[..., N]`` or None.
        masks: one for each of G equal groups of neighbouring kv heads and the query heads that read
            them.

    Raises:
        ValueError: the groups do not divide the kv heads.
    """
    q, k, v, sinks = operands
    groups, kv_heads = len(masks), k.shape[-2]
    if not groups or kv_heads % groups:
        raise ValueError(
            f"{groups} masks are for {groups} equal groups of kv heads, but k has {kv_heads} heads"
        )
    parts = (
        *(jnp.split(x, groups, axis=-2) for x in (q, k, v)),
        [None] * groups if sinks is None else jnp.split(sinks, groups, axis=-1),
    )
    results = [attend(*part, mask) for *part, mask in zip(*parts, masks, strict=True)]
    return tuple(
        None if group[0] is None else jnp.concatenate(group, axis=-1 if i else -2)
        for i, group in enumerate(zip(*results, strict=True))
    )
