import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mask_brute_force import any_mask, brief

from magi_jax import masks
from magi_jax.masks import AttnMask, MaskType, disjoint


def visible_by_ids(ids, positions, k_ids, k_positions, causal, window):
    """Ids must be unique per document here."""
    left, right = window
    distance = np.asarray(k_positions)[None] - np.asarray(positions)[:, None]
    seen = (np.asarray(ids)[:, None] == np.asarray(k_ids)[None]) & (np.asarray(ids)[:, None] > 0)
    if left is not None:
        seen = seen & (distance >= -left)
    if right is not None:
        seen = seen & (distance <= right)
    return seen & (distance <= 0) if causal else seen


@st.composite
def interleaved(draw):
    """Ids in any order; positions of an id rise, with gaps; 0 is padding."""
    segment_ids = draw(st.lists(st.integers(0, 3), max_size=14))
    at, positions = {}, []
    for segment in segment_ids:
        at[segment] = at.get(segment, draw(st.integers(-1, 2))) + draw(
            st.sampled_from([1, 1, 1, 3])
        )
        positions.append(at[segment])
    return segment_ids, positions


windows = st.tuples(*[st.one_of(st.none(), st.integers(0, 4))] * 2)


@brief
@given(interleaved(), st.booleans(), windows)
def test_segment_ids_with_positions(tokens, causal, window):
    ids, positions = tokens
    mask = masks.from_segment_ids(ids, positions, causal=causal, window=window)
    expected = visible_by_ids(ids, positions, ids, positions, causal, window)
    np.testing.assert_array_equal(mask.dense(), expected.reshape(len(ids), len(ids)))
    assert disjoint.find_overlap(mask.slices) is None


@brief
@given(interleaved(), interleaved(), st.booleans(), windows)
def test_segment_ids_of_queries_and_keys(queries, keys, causal, window):
    mask = masks.from_segment_ids(
        *queries, k_segment_ids=keys[0], k_positions=keys[1], causal=causal, window=window
    )
    expected = visible_by_ids(*queries, *keys, causal, window)
    np.testing.assert_array_equal(mask.dense(), expected.reshape(mask.q_len, mask.k_len))
    assert disjoint.find_overlap(mask.slices) is None


def test_positions_that_restart_make_documents():
    packed = masks.varlen([3, 2, 4], causal=True)
    positions = [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert masks.from_segment_ids([7] * 9, positions, causal=True) == packed
    assert masks.from_segment_ids([3, 3, 3, 1, 1, 3, 3, 3, 3], positions, causal=True) == packed
    assert masks.from_segment_ids([3, 3, 3, 1, 1, 9, 9, 9, 9], causal=True) == packed
    both = masks.from_segment_ids([7] * 9, positions, k_segment_ids=[7] * 9, k_positions=positions)
    assert both == masks.varlen([3, 2, 4])


def test_documents_that_only_queries_have_change_no_partner_of_others():
    """Both documents of id 1 are without keys; the one of id 2 is still the first of its id."""
    mask = masks.from_segment_ids(
        [1, 1, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1], k_segment_ids=[2, 2, 2], k_positions=[0, 1, 2]
    )
    assert mask.dense().sum(axis=1).tolist() == [0, 0, 0, 0, 3, 3]


def test_padding_sees_nothing_wherever_it_is():
    mask = masks.from_segment_ids([0, 0, 5, 5, 0, 2, 0], causal=True)
    assert mask.row_counts().tolist() == [0, 0, 1, 2, 0, 1, 0]
    assert masks.from_segment_ids([0, 0]) == masks.empty(2)
    assert masks.from_segment_ids([]) == masks.empty(0)


@brief
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6),
    windows,
    st.booleans(),
)
def test_cu_seqlens_and_segment_ids_round_trip(parts, window, bottom_right):
    q_parts, k_parts = [q for q, _ in parts], [k for _, k in parts]
    if not bottom_right:
        k_parts = q_parts
    mask = masks.varlen(q_parts, k_lengths=k_parts, window=window, bottom_right=bottom_right)
    try:
        packed = masks.to_cu_seqlens(mask)
    except ValueError:
        # Documents that see a part of their keys or queries may look like several windows.
        assert bottom_right
        return
    cu_seqlens, cu_seqlens_k, found, aligned = packed
    again = masks.from_cu_seqlens(cu_seqlens, cu_seqlens_k, window=found, bottom_right=aligned)
    assert again == mask
    assert (cu_seqlens[-1], cu_seqlens_k[-1]) == (mask.q_len, mask.k_len)
    ids = masks.to_segment_ids(mask)
    if not aligned:
        again = masks.from_segment_ids(
            ids.segment_ids,
            ids.positions,
            k_segment_ids=ids.k_segment_ids,
            k_positions=ids.k_positions,
            window=found,
        )
        assert again == mask


@pytest.mark.parametrize(
    ("mask", "lengths", "window"),
    [
        (masks.varlen([3, 4, 1]), [3, 4, 1], (None, None)),
        (masks.varlen([3, 4, 1], causal=True), [3, 4, 1], (None, 0)),
        (masks.varlen([9, 4, 1], causal=True, window=(2, None)), [9, 4, 1], (2, 0)),
        (masks.varlen([9, 4], window=(2, 3)), [9, 4], (2, 3)),
        (masks.causal(6), [6], (None, 0)),
    ],
)
def test_cu_seqlens_of_self_attention(mask, lengths, window):
    packed = masks.to_cu_seqlens(mask)
    assert np.diff(packed.cu_seqlens).tolist() == lengths
    assert np.diff(packed.cu_seqlens_k).tolist() == lengths
    assert packed.window == window
    ids = masks.to_segment_ids(mask)
    assert ids.segment_ids.dtype == np.int32
    assert masks.from_segment_ids(ids.segment_ids, window=window) == mask
    assert masks.from_segment_ids(ids.segment_ids, ids.positions, window=window) == mask


def test_cu_seqlens_leave_padding_out():
    mask = masks.varlen([3, 4], causal=True).shift(0, 0, 10, 10)
    assert masks.to_segment_ids(mask).segment_ids.tolist() == [1, 1, 1, 2, 2, 2, 2, 0, 0, 0]


@brief
@given(hnp.arrays(bool, st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_any_dense_array(dense):
    mask = masks.from_dense(dense)
    np.testing.assert_array_equal(mask.dense(), dense)
    assert disjoint.find_overlap(mask.slices) is None


@brief
@given(any_mask)
def test_dense_arrays_of_masks(mask):
    np.testing.assert_array_equal(masks.from_dense(mask.dense()).dense(), mask.dense())


@pytest.mark.parametrize(
    "mask",
    [
        masks.full(30),
        masks.causal(30, 40, 7),
        masks.local(40, window=(5, 3)),
        masks.varlen([10, 1, 17], causal=True),
        masks.varlen([10, 1, 17], causal=True, window=(3, 0)),
        masks.uniform_block_causal([20], 5),
    ],
    ids=repr,
)
def test_dense_arrays_of_common_masks_give_as_few_slices(mask):
    again = masks.from_dense(mask.dense())
    assert again.same_cells(mask)
    assert again.num_slices <= mask.num_slices


def test_mask_types_of_a_window():
    q_ranges, k_ranges, types = masks.local(10, window=(3, 0)).to_mask_types()
    assert q_ranges.tolist() == [[0, 3], [3, 10]]
    assert k_ranges.tolist() == [[0, 3], [0, 10]]
    assert types.tolist() == [MaskType.CAUSAL, MaskType.BI_CAUSAL]
    _, _, types = masks.local(20, window=(3, 3)).to_mask_types()
    assert types.tolist() == [MaskType.CAUSAL, MaskType.BI_CAUSAL, MaskType.INV_CAUSAL]
    _, _, types = masks.local(8, window=(5, 5)).to_mask_types()
    assert types.tolist() == [MaskType.CAUSAL, MaskType.FULL, MaskType.INV_CAUSAL]
    _, _, types = masks.local(8, window=(4, 4)).to_mask_types()
    assert types.tolist() == [MaskType.CAUSAL, MaskType.INV_CAUSAL]


def test_mask_types_are_as_they_came():
    ranges, types = [(0, 4), (4, 9), (9, 12), (12, 16)], list(MaskType)
    k_ranges = [(0, 4), (0, 9), (3, 9), (2, 8)]
    mask = AttnMask.from_slices(ranges, k_ranges, types, 16)
    q_out, k_out, types_out = mask.to_mask_types()
    assert q_out.tolist() == [list(r) for r in ranges]
    assert k_out.tolist() == [list(r) for r in k_ranges]
    assert types_out.tolist() == types
