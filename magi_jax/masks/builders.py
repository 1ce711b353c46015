"""Masks of one sequence: full, causal, windows, global rows and columns."""

import numpy as np

from magi_jax.masks import bands, checks
from magi_jax.masks.attn_mask import AttnMask
from magi_jax.masks.attn_slice import UNBOUNDED


def empty(q_len: int, k_len: int | None = None) -> AttnMask:
    """Nothing is visible; ``k_len`` is ``q_len`` if not given."""
    k_len = q_len if k_len is None else k_len
    return AttnMask(np.zeros((0, bands.NUM_COLUMNS), np.int64), q_len, k_len, disjoint=True)


def full(q_len: int, k_len: int | None = None) -> AttnMask:
    """Every query sees every key; ``k_len`` is ``q_len`` if not given."""
    return _band(q_len, k_len, -UNBOUNDED, UNBOUNDED)


def causal(q_len: int, k_len: int | None = None, offset: int = 0) -> AttnMask:
    """Query ``q`` sees keys ``k <= q + offset``; ``k_len`` is ``q_len`` if not given.

    ``offset=0`` is aligned top-left, as ``is_causal`` of `jax.nn.dot_product_attention`;
    ``offset=k_len - q_len`` is aligned bottom-right, as `MaskType.CAUSAL`.
    """
    return _band(q_len, k_len, -UNBOUNDED, checks.integer("offset", offset))


def local(
    q_len: int,
    k_len: int | None = None,
    *,
    window: tuple[int | None, int | None],
    causal: bool = False,
    global_prefix: int = 0,
    offset: int = 0,
) -> AttnMask:
    """Sliding window: query ``q`` sees keys ``q + offset - left .. q + offset + right``.

    Args:
        q_len: number of queries.
        k_len: number of keys; ``q_len`` if not given.
        window: ``(left, right)``, neither negative; None is unbounded. ``(w, w)`` is symmetric.
        causal: no query sees keys past ``q + offset``, whatever ``right`` is.
        global_prefix: the first so many keys are seen by every query for which they are not in the
            future (with ``causal``), or by every query (without); also known as attention sinks.
        offset: position of query 0 on the axis of keys.

    Raises:
        ValueError: a reach of the window or the prefix is negative.
    """
    left, right = checks.window(window, causal)
    offset, prefix = checks.integer("offset", offset), checks.length("global_prefix", global_prefix)
    mask = _band(q_len, k_len, offset - left, offset + right)
    if prefix:
        latest = offset if causal else UNBOUNDED
        mask |= global_columns(
            mask.q_len, mask.k_len, columns=(0, min(prefix, mask.k_len))
        ) & _band(mask.q_len, mask.k_len, -UNBOUNDED, latest)
    return mask


def global_rows(q_len: int, k_len: int | None = None, *, rows: tuple[int, int]) -> AttnMask:
    """Queries ``rows = (start, end)`` see every key, all others none; for use with ``|``.

    Raises:
        ValueError: ``rows`` leaves ``[0, q_len]``.
    """
    k_len = q_len if k_len is None else k_len
    return AttnMask.from_slices([rows], [(0, k_len)], 0, q_len, k_len)


def global_columns(q_len: int, k_len: int | None = None, *, columns: tuple[int, int]) -> AttnMask:
    """Every query sees keys ``columns = (start, end)`` and no others; for use with ``|``.

    Raises:
        ValueError: ``columns`` leaves ``[0, k_len]``.
    """
    return AttnMask.from_slices([(0, q_len)], [columns], 0, q_len, k_len)


def _band(q_len: int, k_len: int | None, d_min: int, d_max: int) -> AttnMask:
    q_len, k_len = checks.sequence_lengths(q_len, q_len if k_len is None else k_len)
    return AttnMask(
        np.array([[0, q_len, 0, k_len, d_min, d_max]], np.int64), q_len, k_len, disjoint=True
    )
