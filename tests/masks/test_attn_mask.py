import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_brute_force import (
    any_mask,
    brief,
    cells,
    intervals,
    lengths,
    mask_pairs,
    raw_rows,
    typed_cells,
)

from magi_jax import masks
from magi_jax.masks import AttnMask, AttnSlice, MaskType, disjoint


@st.composite
def typed_slices(draw):
    q_len, k_len = draw(lengths), draw(lengths)
    one = st.tuples(intervals(q_len), intervals(k_len), st.sampled_from(MaskType))
    return q_len, k_len, draw(st.lists(one, max_size=5))


@brief
@given(typed_slices())
def test_mask_types_or_the_first_overlap(case):
    q_len, k_len, slices = case
    layers = [typed_cells(*one, q_len, k_len) for one in slices]
    count = np.sum([np.zeros((q_len, k_len), int), *layers], axis=0)
    q_ranges, k_ranges, types = ([one[i] for one in slices] for i in range(3))
    if count.max(initial=0) > 1:
        with pytest.raises(ValueError, match=r"slices \d+ and \d+ overlap") as error:
            AttnMask.from_slices(q_ranges, k_ranges, types, q_len, k_len)
        words = str(error.value).split()
        assert (layers[int(words[1])] & layers[int(words[3])]).any()
        return
    mask = AttnMask.from_slices(q_ranges, k_ranges, types, q_len, k_len)
    np.testing.assert_array_equal(mask.dense(), count.astype(bool))
    assert mask.num_slices == sum(layer.any() for layer in layers)
    arrays = [np.array(x, np.int32).reshape(-1, 2) for x in (q_ranges, k_ranges)]
    assert AttnMask.from_slices(*arrays, np.array(types, np.uint8), q_len, k_len) == mask
    for one, layer in zip(slices, layers, strict=True):
        piece = AttnSlice.from_type(*one)
        assert piece.area == layer.sum()
        if piece.area:
            again = AttnSlice(*piece.row.tolist())
            tight_ranges = tuple(piece.row[:2].tolist()), tuple(piece.row[2:4].tolist())
            assert AttnSlice.from_type(*tight_ranges, again.mask_type).row.tolist() == list(
                piece.row
            )


@brief
@given(st.lists(raw_rows(10, 12), max_size=9), st.integers(1, 6))
def test_overlap_is_found_exactly(rows, repeat):
    """Also with many disjoint slices around: copies of the drawing, moved along the diagonal."""
    rows = np.array(rows, np.int64).reshape(-1, 6)
    tight = np.concatenate(
        [masks.bands.shift(masks.bands.tighten(rows), 10 * i, 12 * i) for i in range(repeat)]
    )
    layers = [cells(row, 10 * repeat, 12 * repeat) for row in tight]
    count = np.sum([np.zeros((10 * repeat, 12 * repeat), int), *layers], axis=0)
    pair = disjoint.find_overlap(tight)
    assert (pair is not None) == (count.max(initial=0) > 1)
    if pair is not None:
        assert pair[0] < pair[1]
        assert layers[pair[0]][disjoint.shared_cell(*tight[list(pair)])]
        assert layers[pair[1]][disjoint.shared_cell(*tight[list(pair)])]


@brief
@given(any_mask)
def test_measures_against_the_dense_mask(mask):
    dense = mask.dense()
    assert dense.shape == (mask.q_len, mask.k_len)
    assert mask.area == dense.sum()
    assert mask.density == pytest.approx(dense.mean() if dense.size else 0)
    np.testing.assert_array_equal(mask.row_counts(), dense.sum(1))
    np.testing.assert_array_equal(mask.transpose().dense(), dense.T)
    np.testing.assert_array_equal(mask.simplify().dense(), dense)
    assert mask.simplify().num_slices <= mask.num_slices
    assert sum(piece.area for piece in mask) == mask.area
    q_ranges, k_ranges, types = mask.to_mask_types()
    again = AttnMask.from_slices(q_ranges, k_ranges, types, mask.q_len, mask.k_len)
    np.testing.assert_array_equal(again.dense(), dense)
    assert len(types) <= 3 * mask.num_slices


@brief
@given(mask_pairs())
def test_and_or(pair):
    a, b = pair
    both, either = a & b, a | b
    np.testing.assert_array_equal(both.dense(), a.dense() & b.dense())
    np.testing.assert_array_equal(either.dense(), a.dense() | b.dense())
    assert disjoint.find_overlap(both.slices) is None
    assert disjoint.find_overlap(either.slices) is None
    assert either.same_cells(b | a)
    assert a.same_cells(b) == np.array_equal(a.dense(), b.dense())
    assert (a | a).same_cells(a)


@brief
@given(any_mask, st.data())
def test_crop_shift_and_concatenate(mask, data):
    (q0, q1), (k0, k1) = data.draw(intervals(mask.q_len)), data.draw(intervals(mask.k_len))
    cropped = mask.crop((q0, q1), (k0, k1))
    np.testing.assert_array_equal(cropped.dense(), mask.dense()[q0:q1, k0:k1])
    moved = mask.shift(2, 3, mask.q_len + 2, mask.k_len + 4)
    np.testing.assert_array_equal(moved.dense()[2:, 3:-1], mask.dense())
    assert moved.area == mask.area
    stacked = masks.concatenate([mask, cropped, mask])
    assert stacked.area == 2 * mask.area + cropped.area
    q_at, k_at = mask.q_len + cropped.q_len, mask.k_len + cropped.k_len
    np.testing.assert_array_equal(stacked.dense()[q_at:, k_at:], mask.dense())


def test_masks_are_values():
    a = AttnMask.from_slices([(0, 4), (4, 8)], [(0, 4), (0, 8)], [1, 1], 8)
    b = AttnMask.from_slices([(4, 8), (2, 2), (0, 4)], [(0, 8), (0, 1), (0, 4)], [1, 0, 1], 8)
    assert a == b
    assert hash(a) == hash(b)
    assert a != masks.causal(8)
    assert a.same_cells(masks.causal(8))
    assert a.simplify() == masks.causal(8)
    assert a != masks.causal(8, 9)
    assert a != "mask"
    assert repr(a) == "AttnMask(q_len=8, k_len=8, num_slices=2, density=0.5625)"
    for other in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert other == a
        assert not other.slices.flags.writeable
    with pytest.raises(AttributeError):
        a.q_len = 3
    with pytest.raises(ValueError, match="read-only"):
        a.slices[0, 0] = 1


def test_bands_with_open_ends():
    mask = AttnMask.from_slices([(0, 6), (6, 9)], [(0, 6), (0, 9)], [(None, 0), (-1, None)], 9)
    q, k = np.mgrid[:9, :9]
    expected = np.where(q < 6, (k < 6) & (k <= q), k >= q - 1)
    np.testing.assert_array_equal(mask.dense(), expected)
    same = AttnMask.from_slices([(0, 6), (6, 9)], [(0, 6), (0, 9)], [MaskType.CAUSAL, (-1, 9)], 9)
    assert same == mask
    array = np.array([[-100, 0], [-1, 2**62]])
    assert AttnMask.from_slices([(0, 6), (6, 9)], [(0, 6), (0, 9)], array, 9) == mask
    assert AttnMask.from_slices([], [], [], 5) == masks.empty(5)
    assert AttnMask.from_slices([(0, 5)], [(0, 5)], MaskType.FULL, 5) == masks.full(5)
    assert AttnMask.from_slices([(0, 5)], [(0, 5)], np.int32(0), 5) == masks.full(5)


def test_mask_type_of_a_band():
    assert AttnSlice(0, 4, 0, 4, None, 0).mask_type is MaskType.CAUSAL
    assert AttnSlice(0, 4, 0, 4, 0, None).mask_type is MaskType.INV_CAUSAL
    assert AttnSlice(0, 4, 0, 6, 0, 2).mask_type is MaskType.BI_CAUSAL
    assert AttnSlice(0, 4, 0, 4).mask_type is MaskType.FULL
    assert AttnSlice(0, 8, 0, 8, -2, 0).mask_type is None
    assert AttnSlice(0, 8, 0, 8, -2, 0).area == 1 + 2 + 3 * 6


def test_any_number_of_neighbours_are_one_slice():
    rows = [(i, i + 1) for i in range(1000)]
    mask = AttnMask.from_slices(rows, [(0, 50)] * 1000, MaskType.FULL, q_len=1000, k_len=50)
    assert mask.simplify().slices.tolist() == [[0, 1000, 0, 50, -999, 49]]
