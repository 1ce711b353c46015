"""Masks to and from cumulative lengths."""

from typing import Any, NamedTuple

import numpy as np

from magi_jax.masks import bands, checks
from magi_jax.masks.attn_mask import AttnMask
from magi_jax.masks.packed import varlen


class CuSeqlens(NamedTuple):
    """A packed mask as flash-attention's varlen functions take it; `from_cu_seqlens` takes it back.

    Attributes:
        cu_seqlens: ``[D + 1]``, where the queries of each document begin; rises from 0 to T.
        cu_seqlens_k: ``[D + 1]``, the same for keys.
        window: ``(left, right)``, None for unbounded; causal is ``right = 0``.
        bottom_right: whether the window is aligned to the end of each document's keys.
    """

    cu_seqlens: np.ndarray
    cu_seqlens_k: np.ndarray
    window: tuple[int | None, int | None]
    bottom_right: bool


def from_cu_seqlens(
    cu_seqlens: Any,
    cu_seqlens_k: Any = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
) -> AttnMask:
    """`varlen` of cumulative lengths, as flash-attention's varlen functions take them.

    Args:
        cu_seqlens: where the queries of each document begin, and their number, ``[D + 1]``.
        cu_seqlens_k: the same for keys; ``cu_seqlens`` if not given.
        causal: as in `varlen`, top-left unless ``bottom_right``.
        window: as in `varlen`.
        bottom_right: as in `varlen`; flash-attention aligns so.

    Raises:
        ValueError: cumulative lengths do not begin with 0, or fall; or as `varlen`.
    """
    lengths = _lengths_of("cu_seqlens", cu_seqlens)
    k_lengths = None if cu_seqlens_k is None else _lengths_of("cu_seqlens_k", cu_seqlens_k)
    return varlen(
        lengths, k_lengths=k_lengths, causal=causal, window=window, bottom_right=bottom_right
    )


def to_cu_seqlens(mask: AttnMask) -> CuSeqlens:
    """The mask as packed documents with one window.

    Queries without keys and keys without queries become documents of their own, of zero keys or
    queries.

    Raises:
        ValueError: the mask has another form.
    """
    rows = mask.slices
    q_edges = rows[:, bands.Q_START : bands.K_START].reshape(-1)
    k_edges = rows[:, bands.K_START : bands.D_MIN].reshape(-1)
    if (np.diff(q_edges) < 0).any() or (np.diff(k_edges) < 0).any():
        raise ValueError(f"{mask} is no sequence of packed documents, one slice each")
    # Documents lie at odd places. Each gap becomes its queries without keys, then its keys.
    queries = np.diff(np.concatenate([[0], q_edges, [mask.q_len]]))
    keys = np.diff(np.concatenate([[0], k_edges, [mask.k_len]]))
    is_document = np.arange(len(keys)) % 2 == 1
    lengths = np.stack([queries, 0 * queries], axis=1).reshape(-1)
    k_lengths = np.stack([keys * is_document, keys * ~is_document], axis=1).reshape(-1)
    used = (lengths > 0) | (k_lengths > 0)
    lengths, k_lengths = lengths[used], k_lengths[used]
    for bottom_right in (False, True):
        window = _window_of(rows, bottom_right)
        candidate = varlen(lengths, k_lengths=k_lengths, window=window, bottom_right=bottom_right)
        if candidate == mask:
            starts, k_starts = (np.append(0, np.cumsum(part)) for part in (lengths, k_lengths))
            return CuSeqlens(starts, k_starts, window, bottom_right)
    raise ValueError(f"{mask} has no single window for all of its documents")


def _lengths_of(name: str, cumulative: Any) -> np.ndarray:
    array = checks.integers(name, cumulative)
    if not len(array) or array[0] != 0:
        raise ValueError(f"{name} must begin with 0; got {array[:4].tolist()}")
    bad = np.flatnonzero(np.diff(array) < 0)
    if len(bad):
        raise ValueError(
            f"{name} must not fall; got {array[bad[0]]} then {array[bad[0] + 1]} at {bad[0] + 1}"
        )
    return np.diff(array)


def _window_of(rows: np.ndarray, bottom_right: bool) -> tuple[int | None, int | None]:
    """The smallest window that holds all rows; a side that cuts no row is None."""
    q0, q1, k0, k1, d0, d1 = rows.T
    shift = k1 - q1 if bottom_right else k0 - q0
    cuts_below, cuts_above = d0 > k0 - q1 + 1, d1 < k1 - 1 - q0
    left = int((shift - d0).max()) if cuts_below.any() else None
    right = int((d1 - shift).max()) if cuts_above.any() else None
    return left, right
