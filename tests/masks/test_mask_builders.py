"""Builders against the sentence that defines them, cell by cell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_brute_force import brief, grid, lengths

from magi_jax import masks
from magi_jax.masks import disjoint

documents = st.lists(st.integers(0, 6), max_size=6)
reach = st.one_of(st.none(), st.integers(0, 7))
windows = st.tuples(reach, reach)


def places(parts):
    """(document, place in it) of every token."""
    document = np.repeat(np.arange(len(parts)), parts)
    place = np.concatenate([np.zeros(0, int), *(np.arange(n) for n in parts)])
    return document, place


def in_window(distance, window, causal=False):
    left, right = window
    seen = np.ones(np.shape(distance), bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen & (distance <= 0) if causal else seen


def check(mask, expected):
    np.testing.assert_array_equal(mask.dense(), expected)
    assert mask.area == np.sum(expected)
    assert disjoint.find_overlap(mask.slices) is None


@brief
@given(lengths, lengths, st.integers(-15, 15))
def test_one_sequence(q_len, k_len, offset):
    q, k = grid(q_len, k_len)
    check(masks.empty(q_len, k_len), np.zeros((q_len, k_len), bool))
    check(masks.full(q_len, k_len), np.ones((q_len, k_len), bool))
    check(masks.causal(q_len, k_len, offset), k <= q + offset)
    check(masks.causal(q_len), grid(q_len, q_len)[1] <= grid(q_len, q_len)[0])


@brief
@given(lengths, lengths, windows, st.booleans(), st.integers(0, 6), st.integers(-5, 5))
def test_local(q_len, k_len, window, causal, prefix, offset):
    q, k = grid(q_len, k_len)
    distance = k - q - offset
    expected = in_window(distance, window, causal)
    expected |= (k < prefix) & ((distance <= 0) | (not causal))
    mask = masks.local(
        q_len, k_len, window=window, causal=causal, global_prefix=prefix, offset=offset
    )
    check(mask, expected)


@brief
@given(documents, windows, st.booleans(), st.booleans(), st.data())
def test_varlen(q_parts, window, causal, bottom_right, data):
    size = len(q_parts)
    k_parts = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    (q_doc, q_at), (k_doc, k_at) = places(q_parts), places(k_parts)
    if bottom_right and size:
        q_at = q_at + (np.array(k_parts) - np.array(q_parts))[q_doc]
    expected = q_doc[:, None] == k_doc
    expected = expected & in_window(k_at - q_at[:, None], window, causal)
    options = {"window": window, "causal": causal, "bottom_right": bottom_right}
    mask = masks.varlen(q_parts, k_lengths=k_parts, **options)
    check(mask, expected)
    starts, k_starts = np.append(0, np.cumsum(q_parts)), np.append(0, np.cumsum(k_parts))
    assert masks.from_cu_seqlens(starts.astype(int), k_starts.astype(int), **options) == mask
    square = masks.varlen(q_parts, causal=causal)
    document, place = places(q_parts)
    same = document[:, None] == document
    check(square, same & ((place <= place[:, None]) | (not causal)))


@brief
@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=4))
def test_block_causal(frames_of):
    frames = [length for frames in frames_of for length in frames]
    frame, _ = places(frames)
    document = np.repeat(np.arange(len(frames_of)), [len(f) for f in frames_of])[frame]
    expected = (document[:, None] == document) & (frame <= frame[:, None])
    counts = [len(f) for f in frames_of]
    check(masks.block_causal(frames, frames_per_document=counts), expected)
    check(masks.block_causal(frames), frame <= frame[:, None])


@brief
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=3),
    st.one_of(st.none(), st.integers(0, 4)),
    st.integers(0, 3),
)
def test_block_causal_with_a_window_of_frames(frames_of, left, prefix):
    frames = [length for frames in frames_of for length in frames]
    counts = [len(f) for f in frames_of]
    frame, _ = places(frames)
    document = np.repeat(np.arange(len(frames_of)), counts)[frame]
    number = np.concatenate([np.zeros(0, int), *map(np.arange, counts)])[frame]
    is_near = True if left is None else number[:, None] - number <= left
    seen = (number <= number[:, None]) & (is_near | (number < prefix))
    options = {"window": (left, 0), "global_prefix": prefix}
    check(
        masks.block_causal(frames, frames_per_document=counts, **options),
        (document[:, None] == document) & seen,
    )


def test_windows_of_even_frames():
    found = masks.uniform_block_causal([7, 5], 2, window=(1, 0), global_prefix=1)
    wanted = masks.block_causal(
        [2, 2, 2, 1, 2, 2, 1], frames_per_document=[4, 3], window=(1, None), global_prefix=1
    )
    assert found == wanted
    assert found.dense()[6].nonzero()[0].tolist() == [0, 1, 4, 5, 6]
    assert len(masks.uniform_block_causal([7], 2, window=(1, 0), global_prefix=1).slices) == 5
    with pytest.raises(ValueError, match="window must not be negative"):
        masks.block_causal([2, 2], window=(-1, 0))
    with pytest.raises(ValueError, match="global_prefix must not be negative"):
        masks.block_causal([2, 2], global_prefix=-1)


@brief
@given(documents, st.integers(1, 5), st.data())
def test_blocks_and_chunks(parts, block, data):
    document, place = places(parts)
    same = document[:, None] == document
    check(
        masks.uniform_block_causal(parts, block),
        same & (place // block <= place[:, None] // block),
    )
    each = data.draw(st.lists(st.integers(1, 5), min_size=len(parts), max_size=len(parts)))
    chunk = place // np.array([*each, 1])[document]
    expected = same & (chunk == chunk[:, None]) & (place <= place[:, None])
    check(masks.chunked_causal(parts, each), expected)


@brief
@given(documents, st.data())
def test_prefix_lm(parts, data):
    prefixes = [data.draw(st.integers(0, length)) for length in parts]
    document, place = places(parts)
    in_prefix = place < np.array([*prefixes, 0])[document]
    seen = (place <= place[:, None]) | (in_prefix & in_prefix[:, None])
    check(masks.prefix_lm(parts, prefixes), (document[:, None] == document) & seen)


@brief
@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 4), max_size=4)), max_size=3),
    st.booleans(),
)
def test_shared_question(contents, causal):
    parts = [
        (d, a, n) for d, (q, answers) in enumerate(contents) for a, n in enumerate([q, *answers])
    ]
    document, part, place = (
        np.concatenate([np.zeros(0, int), *columns])
        for columns in (
            [np.full(n, d) for d, _, n in parts],
            [np.full(n, a) for _, a, n in parts],
            [np.arange(n) for _, _, n in parts],
        )
    )
    same = document[:, None] == document
    itself = (part == part[:, None]) & ((place <= place[:, None]) | (not causal))
    questions, answers = [q for q, _ in contents], [a for _, a in contents]
    mask = masks.shared_question(questions, answers, causal=causal)
    check(mask, same & (itself | ((part == 0) & (part[:, None] > 0))))


def test_global_rows_and_columns_join_other_masks():
    q, k = grid(20, 20)
    mask = masks.varlen([9, 11], causal=True)
    check(mask | masks.global_rows(20, rows=(7, 13)), mask.dense() | ((q >= 7) & (q < 13)))
    joined = mask | masks.global_columns(20, columns=(3, 12))
    check(joined, mask.dense() | ((k >= 3) & (k < 12)))


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_and_its_prefix_stay_few_slices(causal):
    mask = masks.local(10**6, window=(1024, 1024), causal=causal, global_prefix=128)
    assert mask.num_slices <= 4


def test_few_slices_for_many_answers():
    mask = masks.shared_question([100], [[10, 20, 30]])
    # The question with its first answer, the later answers on the question, and two on themselves.
    assert mask.num_slices == 4
