"""Bad input gives one ValueError that names the values."""

import operator

import numpy as np
import pytest

from magi_jax import masks
from magi_jax.masks import AttnMask

ONE = [(0, 4)]


@pytest.mark.parametrize(
    ("q_ranges", "k_ranges", "types", "message"),
    [
        ([(0, 9)], ONE, 0, r"q_ranges\[0\] = \[0, 9\] leaves the sequence of q_len=8"),
        (ONE, [(-1, 4)], 0, r"k_ranges\[0\] = \[-1, 4\] leaves the sequence of k_len=8"),
        ([(0, 1), (5, 3)], ONE * 2, 0, r"q_ranges\[1\] = \[5, 3\] is reversed"),
        ([0, 4], ONE, 0, r"q_ranges must have 2 axes; got shape \(2,\)"),
        ([(0, 1, 2)], ONE, 0, r"shape \[A, 2\] of \(start, end\); got shape \(1, 3\)"),
        ([(0, 1), (2,)], ONE * 2, 0, "q_ranges must be a regular array of integers"),
        ([(0.0, 4.0)], ONE, 0, "q_ranges must be integers; got dtype float64"),
        ([(True, True)], ONE, 0, "q_ranges must be integers; got dtype bool"),
        ([(0, 2**80)], ONE, 0, "q_ranges must be"),
        (np.array([[0, 2**63]], np.uint64), ONE, 0, "q_ranges must fit int64"),
        (ONE * 2, ONE, 0, "q_ranges and k_ranges must be equally many; got 2 and 1"),
        (ONE, ONE, [0, 1], "types must be one per slice; got 2 for 1 slices"),
        (ONE, ONE, [4], r"types\[0\] must be a MaskType \(FULL = 0, .*; got 4"),
        (ONE, ONE, 7, "types must be a MaskType .* got 7"),
        (ONE, ONE, ["causal"], r"types\[0\] must be a MaskType .* got 'causal'"),
        (ONE, ONE, [True], r"types\[0\] must be a MaskType .* got True"),
        (ONE, ONE, [(1, 2, 3)], r"types\[0\] must be a band .* got \(1, 2, 3\)"),
        (ONE, ONE, [(0.5, None)], r"d_min of types\[0\] must be an integer; got 0.5"),
        (ONE, ONE, np.array([0.0]), "types must be integers; got dtype float64"),
        (ONE, ONE, np.zeros((1, 3), int), r"types must have shape \[A\] or \[A, 2\]; got \[1, 3\]"),
        (ONE, ONE, None, "types must be a MaskType .* got None"),
    ],
)
def test_from_slices_refuses(q_ranges, k_ranges, types, message):
    with pytest.raises(ValueError, match=message):
        AttnMask.from_slices(q_ranges, k_ranges, types, q_len=8)


def test_overlap_names_both_slices_and_a_cell():
    message = (
        r"slices 0 and 2 overlap, both cover \(query 3, key 3\): 0 is AttnSlice\(q_start=0, .*, "
        r"2 is AttnSlice\(q_start=3, q_end=6"
    )
    ranges = [(0, 4), (4, 4), (3, 6)]
    with pytest.raises(ValueError, match=message):
        AttnMask.from_slices(ranges, ranges, [1, 0, 0], 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.full(-1), "q_len must not be negative; got -1"),
        (lambda: masks.full(4.0), "q_len must be an integer; got 4.0"),
        (lambda: masks.full(True), "q_len must be an integer; got True"),
        (lambda: masks.full(2**30, 2**30), "q_len=1073741824 k_len=1073741824"),
        (lambda: masks.varlen([2**30, 2**30]), "q_len [+] k_len must be at most 2147483647"),
        (lambda: masks.full(10**5).dense(), "100000 x 100000 has 10000000000 cells"),
        (lambda: masks.full(4).dense(max_cells=15), "16 cells, more than max_cells=15"),
        (lambda: masks.full(3) | masks.full(4), "cannot be combined: 3 x 3 and 4 x 4"),
        (lambda: masks.full(3) & masks.full(3, 4), "cannot be combined: 3 x 3 and 3 x 4"),
        (lambda: masks.full(3).shift(1, 0), r"query ranges\[0\] = \[1, 4\] leaves"),
        (lambda: masks.full(3).crop((0, 4), (0, 3)), r"q_range\[0\] = \[0, 4\] leaves"),
        (lambda: AttnMask(np.zeros((2, 5), np.int64), 3, 3), r"int64 \[A, 6\]; got int64 \[2, 5\]"),
        (lambda: AttnMask(np.zeros((2, 6)), 3, 3), "got float64"),
        (lambda: masks.varlen([3, -1]), r"lengths\[1\] = -1 is negative"),
        (lambda: masks.varlen([[3]]), r"lengths must have one axis; got shape \(1, 1\)"),
        (
            lambda: masks.uniform_block_causal(42, 4),
            r"must have one axis; got shape \(\); \[42\] is",
        ),
        (
            lambda: masks.from_segment_ids([[1, 1]]),
            r"got shape \(1, 2\); a batch has a mask for each",
        ),
        (lambda: masks.varlen([1.5]), "lengths must be integers"),
        (lambda: masks.varlen([1], k_lengths=[1, 2]), "equally many; got 1 and 2"),
        (lambda: masks.varlen([3], window=3), "window must be .left, right.*got 3"),
        (
            lambda: masks.varlen([3], window=(-1, 0)),
            r"window must not be negative \(None is unbounded\); got \(-1, 0\)",
        ),
        (lambda: masks.local(4, window=(1, 0.5)), "window must be an integer; got 0.5"),
        (lambda: masks.local(4, window=(1, 0), global_prefix=-1), "global_prefix must not"),
        (lambda: masks.block_causal([2, 2], frames_per_document=[3]), "2 frame_lengths; got 3"),
        (lambda: masks.chunked_causal([4], 0), "chunk must be positive; got 0"),
        (lambda: masks.uniform_block_causal([4], [1, 2]), r"block must be one number or one per"),
        (lambda: masks.prefix_lm([4], [5]), r"prefix_lengths\[0\] = 5 is longer than .* = 4"),
        (lambda: masks.prefix_lm([4], [1, 1]), "equally many; got 1 and 2"),
        (lambda: masks.shared_question([4], []), "one sequence per question; got 0 for 1"),
        (lambda: masks.shared_question([4], [[-2]]), r"answer_lengths\[0\]\[0\] = -2 is negative"),
        (lambda: masks.global_rows(4, rows=(3, 5)), r"q_ranges\[0\] = \[3, 5\] leaves"),
        (lambda: masks.from_cu_seqlens([1, 4]), "cu_seqlens must begin with 0"),
        (lambda: masks.from_cu_seqlens([0, 4, 3]), "cu_seqlens must not fall; got 4 then 3 at 2"),
        (lambda: masks.from_dense(np.zeros((2, 2))), "bool array .*got float64"),
        (lambda: masks.from_segment_ids([1, 2, 1]), "id 1 in two runs, at 0 and 2"),
        (lambda: masks.from_segment_ids([1, -2]), r"segment_ids\[1\] = -2 is negative"),
        (lambda: masks.from_segment_ids([1, 1], [0]), "differ in shape"),
        (
            lambda: masks.from_segment_ids([1, 1, 1], [0, 5, 3]),
            "positions of id 1 go back from 5 to 3 at 2",
        ),
        (lambda: masks.from_segment_ids([1], k_positions=[0]), "k_positions needs k_segment_ids"),
        (lambda: masks.from_segment_ids([1], [0], k_segment_ids=[1]), "give both positions"),
        (
            lambda: masks.from_segment_ids(
                [1, 1], [0, 0], k_segment_ids=[1, 1], k_positions=[0, 1]
            ),
            "id 1 has 2 documents in segment_ids and 1 in k_segment_ids",
        ),
        (lambda: masks.to_cu_seqlens(masks.prefix_lm([6], [3])), "no sequence of packed documents"),
        (
            lambda: masks.to_cu_seqlens(
                masks.concatenate([masks.causal(4), masks.full(3), masks.causal(2)])
            ),
            "no single window",
        ),
    ],
)
def test_refusals_name_the_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("other", [np.ones((3, 3), bool), None])
def test_masks_are_combined_with_masks_alone(other):
    mask = masks.causal(3)
    for combine in (operator.or_, operator.and_):
        for pair in ((mask, other), (other, mask)):
            with pytest.raises(TypeError, match=f"must be an AttnMask, got {type(other).__name__}"):
                combine(*pair)
    with pytest.raises(TypeError, match=f"must be an AttnMask, got {type(other).__name__}"):
        masks.concatenate([mask, other])
