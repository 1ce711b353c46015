"""Masks to and from segment ids and positions."""

from typing import Any, NamedTuple

import numpy as np

from magi_jax.masks import checks
from magi_jax.masks.attn_mask import AttnMask
from magi_jax.masks.cu_seqlens import to_cu_seqlens


class SegmentIds(NamedTuple):
    """A packed mask as ids ``[T]`` and ``[S]``, 0 = padding, and positions in each document."""

    segment_ids: np.ndarray
    positions: np.ndarray
    k_segment_ids: np.ndarray
    k_positions: np.ndarray


def from_segment_ids(
    segment_ids: Any,
    positions: Any = None,
    *,
    k_segment_ids: Any = None,
    k_positions: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> AttnMask:
    """Tokens see tokens of their own document; 0 is padding, which sees nothing and is not seen.

    Without positions each id is one run of tokens. With positions, which rise along a document, an
    id may stand in several runs: where its position goes on rising they are pieces of one document,
    also across other documents or gaps; where it is 0 again a new document begins.

    Args:
        segment_ids: ids of the queries ``[T]``, none negative.
        positions: position of each query in its document ``[T]``; counted from 0 if not given.
        k_segment_ids: ids of the keys ``[S]``, for cross-attention; those of the queries if not
            given.
        k_positions: positions of the keys ``[S]``; goes with ``k_segment_ids``.
        causal: a query sees no key at a later position.
        window: ``(left, right)``: a query at position ``p`` sees keys at ``p - left .. p + right``.

    Raises:
        ValueError: an id stands in several runs without positions, positions go back to something
            other than 0, or queries and keys disagree on how many documents share an id.
    """
    left, right = checks.window(window, causal)
    if k_segment_ids is None and k_positions is not None:
        raise ValueError("k_positions needs k_segment_ids")
    if k_segment_ids is not None and (positions is None) != (k_positions is None):
        raise ValueError("with k_segment_ids, give both positions and k_positions or neither")
    queries = _pieces("", segment_ids, positions)
    keys = queries if k_segment_ids is None else _pieces("k_", k_segment_ids, k_positions)
    if keys is not queries:
        _refuse_other_documents(queries, keys)

    # Every piece of a document meets every other: keys are sorted by document.
    order = np.lexsort((keys.document, keys.segment))
    code = _joint_codes(queries, keys)
    query_code, key_code = code[: len(queries.start)], code[len(queries.start) :][order]
    first = np.searchsorted(key_code, query_code, "left")
    count = np.searchsorted(key_code, query_code, "right") - first
    i = np.repeat(np.arange(len(query_code)), count)
    within = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count)
    j = order[first[i] + within]
    # A key's place minus its position, less the same of the query, turns positions into places.
    shift = (keys.start - keys.position)[j] - (queries.start - queries.position)[i]
    columns = [
        queries.start[i],
        queries.end[i],
        keys.start[j],
        keys.end[j],
        shift - left,
        shift + right,
    ]
    return AttnMask(np.stack(columns, axis=1), queries.length, keys.length, disjoint=True)


def to_segment_ids(mask: AttnMask) -> SegmentIds:
    """Ids and positions of the documents of a mask that `to_cu_seqlens` accepts, int32.

    The window is not in the ids: `to_cu_seqlens` gives it.
    """
    packed = to_cu_seqlens(mask)
    lengths, k_lengths = np.diff(packed.cu_seqlens), np.diff(packed.cu_seqlens_k)
    seen = (lengths > 0) & (k_lengths > 0)
    ids = np.where(seen, np.cumsum(seen), 0)
    columns = []
    for part, starts in ((lengths, packed.cu_seqlens), (k_lengths, packed.cu_seqlens_k)):
        place = np.arange(part.sum()) - np.repeat(starts[:-1], part)
        columns += [np.repeat(ids, part).astype(np.int32), place.astype(np.int32)]
    return SegmentIds(*columns)


class _Pieces(NamedTuple):
    """Runs of consecutive positions of one document, in the order of the sequence."""

    start: np.ndarray  # [P] place in the sequence
    end: np.ndarray  # [P]
    segment: np.ndarray  # [P] id
    document: np.ndarray  # [P] how many documents of this id began before
    position: np.ndarray  # [P] of the first token
    length: int  # of the sequence


def _pieces(prefix: str, segment_ids: Any, positions: Any) -> _Pieces:
    name = f"{prefix}segment_ids"
    ids = checks.lengths(name, segment_ids)
    if positions is not None:
        positions = checks.lengths(f"{prefix}positions", positions)
        if positions.shape != ids.shape:
            raise ValueError(
                f"{prefix}positions {positions.shape} and {name} {ids.shape} differ in shape"
            )
    begins = np.diff(ids, prepend=-1) != 0
    if positions is not None:
        begins |= np.diff(positions, prepend=-1) != 1
    start = np.flatnonzero(begins)
    end = np.append(start[1:], len(ids))
    start, end = start[ids[start] > 0], end[ids[start] > 0]
    segment = ids[start]
    order = np.argsort(segment, kind="stable")
    again = np.append(False, np.diff(segment[order]) == 0)
    if positions is None:
        if again.any():
            i = np.flatnonzero(again)[0]
            raise ValueError(
                f"{name} has id {segment[order[i]]} in two runs, at {start[order[i - 1]]} and "
                f"{start[order[i]]}: give positions, or an id of its own to each document"
            )
        return _Pieces(start, end, segment, np.zeros_like(start), np.zeros_like(start), len(ids))

    first = positions[start][order]
    last = (positions[start] + end - start - 1)[order]
    goes_back = again & (first <= np.append(-1, last[:-1])[: len(first)])
    wrong = np.flatnonzero(goes_back & (first > 0))
    if len(wrong):
        i = wrong[0]
        raise ValueError(
            f"{prefix}positions of id {segment[order[i]]} go back from {last[i - 1]} to {first[i]} "
            f"at {start[order[i]]}; a new document of the same id begins at position 0"
        )
    restarts = np.cumsum(goes_back)
    group_first = np.maximum.accumulate(np.where(again, 0, np.arange(len(again))))
    document = np.zeros_like(start)
    document[order] = restarts - restarts[group_first] if len(start) else 0
    return _Pieces(start, end, segment, document, positions[start], len(ids))


def _joint_codes(queries: _Pieces, keys: _Pieces) -> np.ndarray:
    """One number per (id, document), rising in both, for queries and then keys."""
    pairs = np.stack(
        [np.append(queries.segment, keys.segment), np.append(queries.document, keys.document)],
        axis=1,
    )
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def _refuse_other_documents(queries: _Pieces, keys: _Pieces) -> None:
    """An id that begins n documents among the queries and m among the keys has no clear partner."""
    numbers = []
    for pieces in (queries, keys):
        largest: dict[int, int] = {}
        for segment, document in zip(
            pieces.segment.tolist(), pieces.document.tolist(), strict=True
        ):
            largest[segment] = max(largest.get(segment, 0), document)
        numbers.append(largest)
    for segment in numbers[0].keys() & numbers[1].keys():
        q_count, k_count = numbers[0][segment] + 1, numbers[1][segment] + 1
        if q_count != k_count:
            raise ValueError(
                f"id {segment} has {q_count} documents in segment_ids "
                f"and {k_count} in k_segment_ids"
            )
