"""Packing documents of any length into sequences of one length, with NumPy alone.

A document longer than a sequence is cut, and its pieces count as documents: nothing attends, and no
label reaches, from one piece to another. Packing is deterministic in the order of the documents.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

NO_LABEL = -1


class Packed(NamedTuple):
    """One packed sequence, or a batch of them with a leading axis. All int32 ``[..., L]``.

    Attributes:
        tokens: token of each place; 0 where there is padding.
        segment_ids: document of each place, counted from 1; 0 where there is padding.
        positions: place within the document, for rotary embeddings; 0 where there is padding.
        labels: next token of the same document; ``NO_LABEL`` at the end of a document and in
            padding.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def assign(lengths: Iterable[int], seq_len: int, *, method: str = "best_fit") -> list[list[int]]:
    """Groups documents so that each group fits a sequence.

    Args:
        lengths: tokens of each document, at most ``seq_len``.
        seq_len: tokens of a sequence.
        method: ``"best_fit"`` puts the longest documents first, each into the fullest sequence that
            has room (best-fit decreasing); ``"greedy"`` keeps the order and begins a new sequence
            when the next document does not fit.

    Returns:
        Indices of the documents of each sequence.

    Raises:
        ValueError: a document is longer than ``seq_len``, or the method is unknown.
    """
    lengths = [int(length) for length in lengths]
    if too_long := [(i, length) for i, length in enumerate(lengths) if length > seq_len]:
        index, length = too_long[0]
        raise ValueError(f"document {index} has {length} tokens, more than {seq_len=}")
    if method == "greedy":
        return _greedy(lengths, seq_len)
    if method == "best_fit":
        return _best_fit(lengths, seq_len)
    raise ValueError(f'method must be "best_fit" or "greedy", got {method!r}')


def _greedy(lengths: list[int], seq_len: int) -> list[list[int]]:
    groups: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not groups or length > room:
            groups.append([])
            room = seq_len
        groups[-1].append(index)
        room -= length
    return groups


def _best_fit(lengths: list[int], seq_len: int) -> list[list[int]]:
    groups: list[list[int]] = []
    by_room: list[tuple[int, int]] = []  # (room, group), rising
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(by_room, (lengths[index], 0))
        if place < len(by_room):
            room, group = by_room.pop(place)
        else:
            room, group = seq_len, len(groups)
            groups.append([])
        groups[group].append(index)
        bisect.insort(by_room, (room - lengths[index], group))
    return groups


def join(documents: Iterable[np.ndarray], seq_len: int) -> Packed:
    """Lays documents one after the other into a sequence of ``seq_len`` tokens, padding at the end.

    Args:
        documents: token ids ``[length]`` of each document; empty ones are left out.
        seq_len: tokens of the sequence.

    Raises:
        ValueError: the documents have more than ``seq_len`` tokens, or one is no list of token ids.
    """
    documents = [_token_ids(document) for document in documents if len(document)]
    total = sum(map(len, documents))
    if total > seq_len:
        raise ValueError(f"{len(documents)} documents have {total} tokens, more than {seq_len=}")
    fill = (0, 0, 0, NO_LABEL)
    tokens, segment_ids, positions, labels = (np.full(seq_len, value, np.int32) for value in fill)
    start = 0
    for number, document in enumerate(documents, start=1):
        end = start + len(document)
        tokens[start:end] = document
        segment_ids[start:end] = number
        positions[start:end] = np.arange(len(document))
        labels[start : end - 1] = document[1:]
        start = end
    return Packed(tokens, segment_ids, positions, labels)


def _token_ids(document: ArrayLike) -> np.ndarray:
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"a document is a row of integer token ids, got one of shape {ids.shape} and dtype {ids.dtype}"
        )
    return ids


def pack(
    documents: Iterable[np.ndarray],
    seq_len: int,
    *,
    method: str = "best_fit",
    window: int = 256,
    seed: int | None = None,
) -> Iterator[Packed]:
    """Packs a stream of documents, of whatever length and number, into sequences.

    Reads ``window`` documents at a time, packs them by `assign`, and hands each window's sequences
    on except those that are less than half full, whose documents wait for the next window. The last
    sequences of the stream may be padded.

    Args:
        documents: token ids ``[length]`` of each document.
        seq_len: tokens of a sequence; longer documents are cut.
        method: see `assign`.
        window: documents that are packed together; more of them leave less padding.
        seed: shuffles the sequences of each window, so that the pieces of a long document do not
            come one after the other; None keeps the order in which documents came.

    Raises:
        ValueError: ``seq_len`` or ``window`` is no positive number, or the method is unknown; and when it is
            read, a document that is no row of integers.
    """
    if seq_len < 1 or window < 1:
        raise ValueError(f"seq_len and window must be at least 1, got {seq_len=} {window=}")
    assign((), seq_len, method=method)
    return _pack(documents, seq_len, method, window, seed)


def _pack(
    documents: Iterable[np.ndarray], seq_len: int, method: str, window: int, seed: int | None
) -> Iterator[Packed]:
    pieces = itertools.chain.from_iterable(
        np.split(ids, range(seq_len, len(ids), seq_len)) for ids in map(_token_ids, documents)
    )
    rng = None if seed is None else np.random.default_rng(seed)
    waiting: list[np.ndarray] = []
    while fresh := list(itertools.islice(pieces, window)):
        pool = waiting + [piece for piece in fresh if len(piece)]
        waiting = []
        # In the order in which their first documents came, lest all long documents come together.
        groups = sorted(assign(map(len, pool), seq_len, method=method), key=min)
        if rng is not None:
            groups = [groups[index] for index in rng.permutation(len(groups))]
        for group in groups:
            members = [pool[index] for index in group]
            if 2 * sum(map(len, members)) < seq_len:
                waiting += members
            else:
                yield join(members, seq_len)
    for group in assign(map(len, waiting), seq_len, method=method):
        yield join((waiting[index] for index in group), seq_len)


def batch(sequences: Iterable[Packed], size: int) -> Iterator[Packed]:
    """Stacks ``size`` sequences at a time, ``[size, L]``; a last, smaller rest is dropped.

    Raises:
        ValueError: ``size`` is less than 1.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    return _batch(iter(sequences), size)


def _batch(sequences: Iterator[Packed], size: int) -> Iterator[Packed]:
    while len(group := list(itertools.islice(sequences, size))) == size:
        yield Packed(*(np.stack(field) for field in zip(*group, strict=True)))
