"""Dense arrays straight from the definition of a slice, and strategies that draw small masks."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from magi_jax.masks import AttnMask
from magi_jax.masks.attn_slice import UNBOUNDED

brief = settings(deadline=None, max_examples=100)


def grid(q_len, k_len):
    return np.arange(q_len)[:, None], np.arange(k_len)[None]


def cells(row, q_len, k_len):
    """Boolean ``[T, S]`` of one row that need not be tight."""
    q0, q1, k0, k1, low, high = row
    q, k = grid(q_len, k_len)
    return (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= low) & (k - q <= high)


def typed_cells(q_range, k_range, mask_type, q_len, k_len):
    """Boolean ``[T, S]`` of a MaskType, as flash attention aligns it."""
    (q0, q1), (k0, k1) = q_range, k_range
    low = k0 - q0 if mask_type in (2, 3) else -UNBOUNDED
    high = k1 - q1 if mask_type in (1, 3) else UNBOUNDED
    return cells((q0, q1, k0, k1, low, high), q_len, k_len)


def intervals(length):
    return st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)


@st.composite
def raw_rows(draw, q_len, k_len):
    """A row inside the rectangle with any diagonals, mostly not tight."""
    diagonal = st.one_of(st.integers(-q_len - 2, k_len + 2), st.just(None))
    low, high = draw(diagonal), draw(diagonal)
    low = -UNBOUNDED if low is None else low
    high = UNBOUNDED if high is None else high
    return (*draw(intervals(q_len)), *draw(intervals(k_len)), low, high)


@st.composite
def small_masks(draw, q_len, k_len, max_slices=6):
    """A mask of disjoint slices, kept by comparing dense arrays."""
    kept, covered = [], np.zeros((q_len, k_len), bool)
    for row in draw(st.lists(raw_rows(q_len, k_len), max_size=max_slices)):
        if not (covered & cells(row, q_len, k_len)).any():
            kept.append(row)
            covered |= cells(row, q_len, k_len)
    mask = AttnMask(np.array(kept, np.int64).reshape(-1, 6), q_len, k_len)
    np.testing.assert_array_equal(mask.dense(), covered)
    return mask


lengths = st.integers(0, 13)


@st.composite
def mask_pairs(draw):
    q_len, k_len = draw(lengths), draw(lengths)
    return draw(small_masks(q_len, k_len)), draw(small_masks(q_len, k_len))


any_mask = st.tuples(lengths, lengths).flatmap(lambda shape: small_masks(*shape))
