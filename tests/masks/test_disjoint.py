"""The exact check, where slices lie close: what is disjoint must pass, what meets late must not."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mask_brute_force import brief, cells, raw_rows

from magi_jax import masks
from magi_jax.masks import bands, disjoint

SIDE = 9


def tight(*rows):
    return bands.tighten(np.array(rows, np.int64))


@brief
@given(hnp.arrays(bool, (SIDE, SIDE)), st.lists(raw_rows(SIDE, SIDE), max_size=1), st.randoms())
def test_one_more_slice_among_many(dense, extra, random):
    """Slices that fill a random picture are disjoint; one more meets them where it covers it."""
    rows = [*masks.from_dense(dense).slices.tolist(), *map(list, extra)]
    random.shuffle(rows)
    rows = tight(*rows) if rows else np.zeros((0, 6), np.int64)
    meets = any((cells(row, SIDE, SIDE) & dense).any() for row in extra)
    pair = disjoint.find_overlap(rows)
    assert (pair is not None) == meets
    if meets:
        first, second = (cells(row, SIDE, SIDE) for row in rows[list(pair)])
        assert (first & second).any()


def test_two_slices_that_meet_after_the_one_between_them_ended():
    triangle, between, columns = (0, 8, 0, 8, -9, 0), (0, 3, 3, 5, -9, 9), (0, 8, 5, 8, -9, 9)
    assert disjoint.find_overlap(tight(triangle, between, columns)) == (0, 2)
    assert disjoint.find_overlap(tight(triangle, between)) is None


def test_a_diagonal_that_passes_below_a_slice_that_ends():
    diagonal, box = (0, 10, 0, 10, 0, 0), (3, 5, 5, 8, -9, 9)
    assert disjoint.find_overlap(tight(diagonal, box)) is None
    assert disjoint.find_overlap(tight(diagonal, (3, 6, 5, 8, -9, 9))) == (0, 1)
