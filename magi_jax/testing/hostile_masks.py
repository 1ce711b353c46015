"""Masks made to be hard: what is legal, rarely drawn, and easily computed wrongly.

Every mask comes with its dense cells, computed here from the loose ranges and bands by definition,
without anything of `magi_jax.masks`: the algebra of masks is on trial too.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from magi_jax.masks import AttnMask, MaskType

# (q_start, q_end, k_start, k_end, MaskType or band); a band's end may be None or far outside.
Band = tuple[int | None, int | None]
Piece = tuple[int, int, int, int, MaskType | Band]

FAR = (2**31 - 1, 2**31, 2**40, 2**62)


@dataclass(frozen=True)
class HostileMask:
    """A mask, its family, and its cells ``[T, S]`` by definition."""

    family: str
    mask: AttnMask
    dense: np.ndarray


def hostile_mask(
    rng: np.random.Generator, q_len: int, k_len: int, family: str | None = None
) -> HostileMask:
    """Draws a mask.

    Args:
        rng: the draw is a function of its state.
        q_len: number of queries, at least 1.
        k_len: number of keys, at least 1.
        family: one of `FAMILIES`; None draws one.

    Raises:
        AssertionError: `AttnMask` takes overlapping slices, or shows other cells than it should.
    """
    if family is None:
        family = str(rng.choice(list(FAMILIES)))
    pieces = FAMILIES[family](rng, q_len, k_len)
    counts = np.zeros((q_len, k_len), np.int32)
    for piece in pieces:
        _add_cells(counts, piece)
    dense = counts > 0
    if counts.max(initial=0) > 1:
        _require_refusal(pieces, q_len, k_len, family)
        mask = _mask_of([], q_len, k_len)
        for piece in pieces:
            mask |= _mask_of([piece], q_len, k_len)
    else:
        mask = _mask_of(pieces, q_len, k_len)
    if mask.area != dense.sum() or not np.array_equal(mask.dense(), dense):
        raise AssertionError(f"{family}: the mask shows other cells than {pieces}")
    return HostileMask(family, mask, dense)


def _mask_of(pieces: list[Piece], q_len: int, k_len: int) -> AttnMask:
    q_ranges = [piece[:2] for piece in pieces]
    k_ranges = [piece[2:4] for piece in pieces]
    return AttnMask.from_slices(q_ranges, k_ranges, [piece[4] for piece in pieces], q_len, k_len)


def _require_refusal(pieces: list[Piece], q_len: int, k_len: int, family: str) -> None:
    try:
        _mask_of(pieces, q_len, k_len)
    except ValueError:
        return
    raise AssertionError(f"{family}: overlapping slices were taken: {pieces}")


def _add_cells(counts: np.ndarray, piece: Piece) -> None:
    q0, q1, k0, k1, kind = piece
    diagonal = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
    seen = np.ones(diagonal.shape, bool)
    if isinstance(kind, tuple):
        low, high = kind
        if low is not None:
            seen &= diagonal >= max(low, -(2**40))
        if high is not None:
            seen &= diagonal <= min(high, 2**40)
    else:
        if kind in (MaskType.CAUSAL, MaskType.BI_CAUSAL):
            seen &= diagonal <= k1 - q1
        if kind in (MaskType.INV_CAUSAL, MaskType.BI_CAUSAL):
            seen &= diagonal >= k0 - q0
    counts[q0:q1, k0:k1] += seen


def _edges(rng: np.random.Generator, length: int, count: int) -> list[int]:
    """Rising positions from 0 to ``length``, some of them equal."""
    return sorted([0, length, *rng.integers(0, length + 1, count).tolist()])


def _tile_edges(rng: np.random.Generator, length: int) -> list[int]:
    """Positions at, before and behind the edges of tiles of 128 and blocks of 32."""
    near = [e + d for e in range(0, length + 2, 32) for d in (-1, 0, 1)]
    chosen = rng.choice(near, min(len(near), 6)).tolist()
    return sorted({0, length, *(min(max(e, 0), length) for e in chosen)})


def _lengths(rng: np.random.Generator, total: int) -> list[int]:
    """Lengths of documents that fill ``total``: zeros, ones, primes, neighbours of powers of two."""
    menu = np.array([0, 0, 1, 1, 1, 2, 3, 7, 13, 31, 32, 33, 61, 97, 127, 128, 129])
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(int(rng.choice(menu)), left))
    return [*lengths, 0]


def _kind(rng: np.random.Generator, q0: int, q1: int, k0: int, k1: int) -> MaskType | Band:
    """A type, or a band that may be one diagonal, unbounded, or miss the rectangle."""
    draw = rng.random()
    if draw < 0.6:
        return MaskType(int(rng.integers(0, 4)))
    low, high = sorted(rng.integers(k0 - q1 - 2, k1 - q0 + 3, 2).tolist())
    if draw < 0.7:
        return low, low
    if draw < 0.8:
        return (None, high) if rng.random() < 0.5 else (low, None)
    if draw < 0.9:
        far = int(rng.choice(FAR))
        return (-far, high) if rng.random() < 0.5 else (low, far)
    return low, high


def _grid(rng, q_edges: Iterable[int], k_edges: Iterable[int], kept: float) -> list[Piece]:
    """Touching rectangles, each with a kind of its own, some left out."""
    q_edges, k_edges = list(q_edges), list(k_edges)
    return [
        (q0, q1, k0, k1, _kind(rng, q0, q1, k0, k1))
        for q0, q1 in itertools.pairwise(q_edges)
        for k0, k1 in itertools.pairwise(k_edges)
        if rng.random() < kept
    ]


def _random_grid(rng, q_len, k_len):
    cuts = rng.integers(0, 7, 2)
    return _grid(rng, _edges(rng, q_len, cuts[0]), _edges(rng, k_len, cuts[1]), rng.random())


def _grid_on_tile_edges(rng, q_len, k_len):
    return _grid(rng, _tile_edges(rng, q_len), _tile_edges(rng, k_len), 0.7)


def _documents(rng, q_len, k_len):
    """Documents with kinds of their own; keys and queries of one document may differ in number."""
    q_edges = np.cumsum([0, *_lengths(rng, q_len)]).tolist()
    k_edges = q_edges
    if q_len != k_len or rng.random() < 0.3:
        k_edges = _edges(rng, k_len, len(q_edges) - 2)
    one_kind = None if rng.random() < 0.3 else MaskType(int(rng.integers(0, 4)))
    return [
        (q0, q1, k0, k1, _kind(rng, q0, q1, k0, k1) if one_kind is None else one_kind)
        for q0, q1, k0, k1 in zip(q_edges, q_edges[1:], k_edges, k_edges[1:], strict=False)
    ]


def _one_token_documents(rng, q_len, k_len):
    kind = MaskType(int(rng.integers(0, 4)))
    shift = int(rng.integers(0, abs(q_len - k_len) + 1))
    q_at, k_at = (shift, 0) if q_len > k_len else (0, shift)
    count = min(q_len - q_at, k_len - k_at)
    return [(q_at + i, q_at + i + 1, k_at + i, k_at + i + 1, kind) for i in range(count)]


def _one_document(rng, q_len, k_len):
    return [(0, q_len, 0, k_len, _kind(rng, 0, q_len, 0, k_len))]


def _square_bi_causal(rng, q_len, k_len):
    """Squares that show their diagonal only, side by side and shifted against it."""
    side = int(rng.integers(1, min(q_len, k_len) + 1))
    q_starts = range(0, q_len - side + 1, side)
    k_starts = rng.permutation(max(k_len - side + 1, 1))[: len(q_starts)].tolist()
    return [
        (q, q + side, k, k + side, MaskType.BI_CAUSAL)
        for q, k in zip(q_starts, k_starts, strict=False)
    ]


def _band_stack(rng, q_len, k_len):
    """One rectangle many times over, with bands that touch, or leave out single diagonals."""
    q0, q1 = sorted(rng.integers(0, q_len + 1, 2).tolist())
    k0, k1 = sorted(rng.integers(0, k_len + 1, 2).tolist())
    cuts = np.unique(rng.integers(k0 - q1 - 3, k1 - q0 + 4, int(rng.integers(2, 12)))).tolist()
    gap = int(rng.integers(1, 3))
    bands: list[Band] = [(a, b - gap) for a, b in itertools.pairwise(cuts) if a <= b - gap]
    bands = [(None, cuts[0] - gap), *bands, (cuts[-1], None)]
    return [(q0, q1, k0, k1, bands[i]) for i in rng.permutation(len(bands)).tolist()]


def _bands_that_miss(rng, q_len, k_len):
    pieces = _random_grid(rng, q_len, k_len)
    aside = [(k_len, 2**31), (-(2**62), -q_len), (q_len + k_len, q_len + k_len)]
    return [(*p[:4], p[4] if rng.random() < 0.4 else aside[rng.integers(3)]) for p in pieces]


def _windows(rng, q_len, k_len):
    left, right = rng.choice([0, 1, 2, 31, 32, 33, 126, 127, 128, 129], 2).tolist()
    at = int(rng.integers(-q_len, k_len + 1)) if rng.random() < 0.3 else 0
    edges = np.cumsum([0, *_lengths(rng, q_len)]).tolist()
    pairs = itertools.pairwise(edges) if rng.random() < 0.5 else [(0, q_len)]
    return [(q0, q1, 0, k_len, (at - left, at + right)) for q0, q1 in pairs]


def _comb(rng, q_len, k_len):
    """Rows without keys between rows that have some, and keys that nobody sees."""
    step, thick = int(rng.integers(2, 9)), int(rng.integers(1, 3))
    k0, k1 = sorted(rng.integers(0, k_len + 1, 2).tolist())
    return [
        (q, min(q + thick, q_len), k0, k1, MaskType(int(rng.integers(0, 4))))
        for q in range(int(rng.integers(0, step)), q_len, step + thick)
    ]


def _cells(rng, q_len, k_len):
    cells = rng.choice(q_len * k_len, min(48, q_len * k_len), replace=False)
    pairs = [divmod(int(cell), k_len) for cell in cells]
    return [(q, q + 1, k, k + 1, MaskType(int(rng.integers(0, 4)))) for q, k in pairs]


def _overlapping(rng, q_len, k_len):
    pieces = []
    for _ in range(int(rng.integers(2, 7))):
        q0, q1 = sorted(rng.integers(0, q_len + 1, 2).tolist())
        k0, k1 = sorted(rng.integers(0, k_len + 1, 2).tolist())
        pieces.append((q0, q1, k0, k1, _kind(rng, q0, q1, k0, k1)))
    return pieces


def _nothing(rng, q_len, k_len):
    q, k = int(rng.integers(0, q_len + 1)), int(rng.integers(0, k_len + 1))
    kind = MaskType(int(rng.integers(0, 4)))
    return [(q, q, 0, k_len, kind), (0, q_len, k, k, kind), (q_len, q_len, k_len, k_len, kind)]


FAMILIES: dict[str, Callable[[np.random.Generator, int, int], list[Piece]]] = {
    "grid": _random_grid,
    "tile_edges": _grid_on_tile_edges,
    "documents": _documents,
    "one_token_documents": _one_token_documents,
    "one_document": _one_document,
    "square_bi_causal": _square_bi_causal,
    "band_stack": _band_stack,
    "bands_that_miss": _bands_that_miss,
    "windows": _windows,
    "comb": _comb,
    "cells": _cells,
    "overlapping": _overlapping,
    "nothing": _nothing,
}
