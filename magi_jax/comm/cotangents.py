"""Cotangents of pytrees that mix floating arrays with integers, which have none."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def floating_cotangents(transpose: Callable, cotangents: Sequence[Any]) -> list[Any]:
    """Applies ``transpose`` to the list of floating cotangents; the others, float0, become None.

    Args:
        transpose: maps the list of floating cotangents to a list of as many.
        cotangents: what `jax.custom_vjp` hands to a backward pass.
    """
    floating = [i for i, g in enumerate(cotangents) if g.dtype != jax.dtypes.float0]
    results: list[Any] = [None] * len(cotangents)
    for i, result in zip(floating, transpose([cotangents[i] for i in floating]), strict=True):
        results[i] = result
    return results
