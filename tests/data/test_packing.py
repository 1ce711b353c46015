"""Packing keeps every token once, mixes no documents, and wastes little."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_jax.data import NO_LABEL, assign, batch, join, pack

METHODS = ("best_fit", "greedy")


def _documents(lengths):
    """Documents whose tokens are all different, so that a token tells where it came from."""
    ends = np.cumsum(lengths)
    return [np.arange(end - n + 1, end + 1) for end, n in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=40), seq_len=st.integers(50, 90))
def test_assign_places_each_document_once_and_within_the_room(method, lengths, seq_len):
    groups = assign(lengths, seq_len, method=method)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in group) <= seq_len for group in groups)


def test_best_fit_fills_gaps_that_greedy_leaves():
    lengths = [70, 60, 40, 30]
    assert assign(lengths, 100, method="best_fit") == [[0, 3], [1, 2]]
    assert assign(lengths, 100, method="greedy") == [[0], [1, 2], [3]]


def test_best_fit_leaves_the_larger_room_free():
    assert sorted(map(sorted, assign([7, 5, 3], 10, method="best_fit"))) == [[0, 2], [1]]


def test_assign_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="document 1 has 9 tokens, more than seq_len=8"):
        assign([3, 9], 8)
    with pytest.raises(ValueError, match="'worst_fit'"):
        assign([3], 8, method="worst_fit")


def test_join_lays_out_documents():
    packed = join([np.array([5, 6, 7]), np.array([], int), np.array([8])], 6)
    np.testing.assert_array_equal(packed.tokens, [5, 6, 7, 8, 0, 0])
    np.testing.assert_array_equal(packed.segment_ids, [1, 1, 1, 2, 0, 0])
    np.testing.assert_array_equal(packed.positions, [0, 1, 2, 0, 0, 0])
    np.testing.assert_array_equal(packed.labels, [6, 7, NO_LABEL, NO_LABEL, NO_LABEL, NO_LABEL])
    assert all(field.dtype == np.int32 for field in packed)
    with pytest.raises(ValueError, match="2 documents have 8 tokens, more than seq_len=6"):
        join([np.ones(4, int), np.ones(4, int)], 6)


@pytest.mark.parametrize("document", [np.zeros((3, 2), int), np.zeros(3), ["a", "b"]])
def test_documents_are_rows_of_integers(document):
    with pytest.raises(ValueError, match="row of integer token ids, got one of shape"):
        list(pack([[1, 2], document], 8))


def test_wrong_arguments_are_refused_before_anything_is_read():
    for sizes in ({"seq_len": 0}, {"seq_len": 8, "window": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got"):
            pack([[1, 2]], **sizes)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        batch(pack([[1, 2]], 8), 0)
    with pytest.raises(ValueError, match="'worst_fit'"):
        pack([[1, 2]], 8, method="worst_fit")


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=40),
    seq_len=st.integers(5, 40),
    window=st.integers(1, 20),
)
def test_pack_keeps_every_token_and_separates_documents(method, lengths, seq_len, window):
    documents = _documents(lengths)
    owner = np.concatenate([[-1], np.repeat(np.arange(len(lengths)), lengths)])
    seen = []
    for packed in pack(documents, seq_len, method=method, window=window):
        assert all(field.shape == (seq_len,) for field in packed)
        used = packed.segment_ids > 0
        seen.extend(packed.tokens[used])
        for number in np.unique(packed.segment_ids[used]):
            tokens = packed.tokens[packed.segment_ids == number]
            assert len(set(owner[tokens])) == 1
            np.testing.assert_array_equal(np.diff(tokens), 1)
        labelled = packed.labels != NO_LABEL
        np.testing.assert_array_equal(packed.labels[labelled], packed.tokens[labelled] + 1)
        same_document = packed.segment_ids[:-1] == packed.segment_ids[1:]
        np.testing.assert_array_equal(labelled[:-1], same_document & used[:-1])
        assert not labelled[-1]
    assert sorted(seen) == list(range(1, sum(lengths) + 1))


def test_documents_of_a_sequence_that_is_less_than_half_full_wait_for_the_next_window():
    """Two of each window fill a sequence; the third meets that of the window after."""
    documents = [np.full(length, i + 1) for i, length in enumerate([6, 4, 4, 6, 4, 4])]
    packed = list(pack(documents, 10, window=3))
    held = [sorted(set(sequence.tokens.tolist()) - {0}) for sequence in packed]
    assert held == [[1, 2], [3, 4], [5, 6]]


def test_a_sequence_that_is_half_full_does_not_wait():
    """Neither for documents that have not come yet, nor to be filled by them."""

    def documents():
        yield np.full(5, 1)
        yield np.full(4, 2)
        raise AssertionError("read further than the first sequence needs")

    sequences = pack(documents(), 10, window=1)
    assert next(sequences).tokens.tolist() == [1] * 5 + [0] * 5
    with pytest.raises(AssertionError, match="read further"):  # 4 of 10 wait
        next(sequences)


def test_pack_wastes_little_on_long_tailed_documents():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6, 1.5, 2000).astype(int), 8192)
    sequences = list(pack(_documents(lengths), 8192))
    assert lengths.sum() / (len(sequences) * 8192) > 0.97


def test_seed_shuffles_the_same_sequences():
    documents = _documents([30] * 40)
    plain, shuffled, again = (
        [tuple(packed.tokens) for packed in pack(documents, 60, seed=seed)] for seed in (None, 1, 1)
    )
    assert shuffled == again
    assert shuffled != plain
    assert sorted(shuffled) == sorted(plain)


def test_batch_stacks_and_drops_the_rest():
    sequences = [join([np.full(4, i)], 4) for i in range(5)]
    batches = list(batch(sequences, 2))
    assert [b.tokens[:, 0].tolist() for b in batches] == [[0, 1], [2, 3]]
    assert batches[0].labels.shape == (2, 4)
