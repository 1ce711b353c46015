"""Masks of documents packed one after the other."""

from typing import Any

import numpy as np

from magi_jax.masks import bands, checks
from magi_jax.masks.attn_mask import AttnMask


def varlen(
    lengths: Any,
    *,
    k_lengths: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> AttnMask:
    """Packed documents: each query sees keys of its own document only.

    Args:
        lengths: queries of each document ``[D]``; zero is legal.
        k_lengths: keys of each document ``[D]``, for cross-attention; ``lengths`` if not given.
        causal: query ``i`` of a document sees its keys ``j <= i`` only (top-left).
        window: ``(left, right)``: query ``i`` sees keys ``i - left .. i + right``; None is unbounded.
    """
    lengths = checks.lengths("lengths", lengths)
    k_lengths = lengths if k_lengths is None else checks.lengths("k_lengths", k_lengths)
    if len(lengths) != len(k_lengths):
        raise ValueError(
            f"lengths and k_lengths must be equally many; got {len(lengths)} and {len(k_lengths)}"
        )
    left, right = checks.window(window, causal)
    q_start, q_end = starts_and_ends(lengths)
    k_start, k_end = starts_and_ends(k_lengths)
    shift = k_start - q_start
    rows = np.stack([q_start, q_end, k_start, k_end, shift - left, shift + right], axis=1)
    return AttnMask(rows, int(lengths.sum()), int(k_lengths.sum()), disjoint=True)


def starts_and_ends(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where parts begin and end when they lie one after the other."""
    end = np.cumsum(lengths)
    return end - lengths, end
