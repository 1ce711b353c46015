import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mask_brute_force import brief, cells, raw_rows

from magi_jax.masks import bands

Q, K = 11, 9


def dense(rows):
    return sum((cells(row, Q, K).astype(int) for row in rows), np.zeros((Q, K), int))


@brief
@given(raw_rows(Q, K))
def test_tight_rows_keep_the_cells_and_touch_every_edge(row):
    expected = cells(row, Q, K)
    tight = bands.tighten(np.array([row]))
    np.testing.assert_array_equal(dense(tight), expected)
    np.testing.assert_array_equal(bands.tighten(tight), tight)
    assert bands.area(tight)[0] == expected.sum()
    if not expected.any():
        assert not tight.any()
        return
    q, k = np.nonzero(expected)
    edges = [q.min(), q.max() + 1, k.min(), k.max() + 1, (k - q).min(), (k - q).max()]
    assert tight[0].tolist() == edges


@brief
@given(raw_rows(Q, K), raw_rows(Q, K))
def test_intersection_and_difference(a, b):
    tight_a, tight_b = bands.tighten(np.array([a])), bands.tighten(np.array([b]))
    in_a, in_b = cells(a, Q, K), cells(b, Q, K)
    np.testing.assert_array_equal(dense(bands.intersect(tight_a, tight_b)), in_a & in_b)
    pieces = bands.subtract(tight_a, tight_b)
    assert pieces.shape == (1, 6, 6)
    np.testing.assert_array_equal(dense(pieces[0]), (in_a & ~in_b).astype(int))
    np.testing.assert_array_equal(bands.tighten(pieces[0]), pieces[0])


@brief
@given(raw_rows(Q, K), st.integers(-1, Q + 1), st.integers(-1, K + 1))
def test_clip_transpose_and_shift(row, q_cut, k_cut):
    tight = bands.tighten(np.array([row]))
    expected = cells(row, Q, K)
    kept = expected.copy()
    kept[max(q_cut, 0) :] = False
    kept[:, : max(k_cut, 0)] = False
    np.testing.assert_array_equal(dense(bands.clip(tight, q_end=q_cut, k_start=k_cut)), kept)
    turned = bands.transpose(tight)
    np.testing.assert_array_equal(cells(turned[0], K, Q), expected.T)
    moved = bands.shift(tight, 3, 5)
    np.testing.assert_array_equal(cells(moved[0], Q + 3, K + 5)[3:, 5:], expected)


@brief
@given(raw_rows(Q, K), st.integers(-1, Q))
def test_key_bounds(row, query):
    low, high = bands.key_bounds(bands.tighten(np.array([row])), np.array([query]))
    seen = np.flatnonzero(cells(row, Q, K)[query]) if 0 <= query < Q else np.zeros(0, int)
    np.testing.assert_array_equal(np.arange(low[0], high[0]), seen)


def test_area_of_long_slices_is_exact():
    length = 2**30 - 1
    causal = np.array([[0, length, 0, length, -(2**40), 0]])
    assert bands.area(bands.tighten(causal))[0] == length * (length + 1) // 2
