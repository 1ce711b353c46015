"""Masks of documents packed one after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from magi_jax.masks import checks
from magi_jax.masks.attn_mask import AttnMask
from magi_jax.masks.attn_slice import UNBOUNDED


def varlen(
    lengths: Any,
    *,
    k_lengths: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
) -> AttnMask:
    """Packed documents: each query sees keys of its own document only.

    Args:
        lengths: queries of each document ``[D]``; zero is legal.
        k_lengths: keys of each document ``[D]``, for cross-attention; ``lengths`` if not given.
        causal: query ``i`` of a document sees its keys ``j <= i`` only.
        window: ``(left, right)``: query ``i`` sees keys ``i - left .. i + right``; None is
            unbounded.
        bottom_right: queries are the last tokens of their keys' axis: ``i`` counts from
            ``k_length - length`` and not from 0, as in flash-attention's varlen functions.

    Returns:
        A mask of ``sum(lengths)`` queries and ``sum(k_lengths)`` keys with at most one slice per
        document.

    Raises:
        TypeError: lengths are traced, or values that only a device holds.
        ValueError: lengths are no integers, negative, or of another number than ``k_lengths``, or the window
            is no pair of reaches.
    """
    lengths = checks.lengths("lengths", lengths)
    k_lengths = lengths if k_lengths is None else checks.lengths("k_lengths", k_lengths)
    if len(lengths) != len(k_lengths):
        raise ValueError(
            f"lengths and k_lengths must be equally many; got {len(lengths)} and {len(k_lengths)}"
        )
    left, right = checks.window(window, causal)
    q_start, q_end = starts_and_ends(lengths)
    k_start, k_end = starts_and_ends(k_lengths)
    shift = k_end - q_end if bottom_right else k_start - q_start
    rows = np.stack([q_start, q_end, k_start, k_end, shift - left, shift + right], axis=1)
    return AttnMask(rows, int(lengths.sum()), int(k_lengths.sum()), disjoint=True)


def block_causal(
    frame_lengths: Any,
    *,
    frames_per_document: Any = None,
    window: tuple[int | None, int | None] | None = None,
    global_prefix: int = 0,
) -> AttnMask:
    """Frames that see themselves and earlier frames of their document, as in video models.

    Args:
        frame_lengths: tokens of each frame ``[F]``, document after document.
        frames_per_document: frames of each document ``[D]``, summing to F; one document if not
            given.
        window: ``(left, right)``, counted in frames: frame ``f`` sees frames ``f - left .. f``; None is
            unbounded. Frames are causal, whatever ``right`` is.
        global_prefix: the first so many frames of a document are seen by all of its later frames, however
            far they are.

    Raises:
        ValueError: lengths are no integers or negative, ``frames_per_document`` does not sum to F, or the
            window or prefix is negative.
    """
    frames = checks.lengths("frame_lengths", frame_lengths)
    if frames_per_document is None:
        counts = np.array([len(frames)], np.int64)
    else:
        counts = checks.lengths("frames_per_document", frames_per_document)
        if counts.sum() != len(frames):
            raise ValueError(
                f"frames_per_document must sum to the {len(frames)} frame_lengths; "
                f"got {counts.sum()}"
            )
    left, _ = checks.window(window, causal=True)
    prefix = checks.length("global_prefix", global_prefix)
    start, end = starts_and_ends(frames)
    edges = np.append(start, frames.sum())
    number = np.arange(len(frames))
    opening = np.repeat(starts_and_ends(counts)[0], counts)  # first frame of the document
    first = np.maximum(opening, number - left)  # first frame of the window
    prefix_end = np.minimum(opening + prefix, first)
    first = np.where(prefix_end == first, opening, first)  # they meet: one slice
    low, high = _no_band(len(frames))
    rows = np.stack([start, end, edges[first], end, low, high], axis=1)
    apart = prefix_end < first
    of_prefix = np.stack([start, end, edges[opening], edges[prefix_end], low, high], axis=1)[apart]
    total = int(frames.sum())
    return AttnMask(np.concatenate([rows, of_prefix]), total, total, disjoint=True)


def uniform_block_causal(
    lengths: Any,
    block: Any,
    *,
    window: tuple[int | None, int | None] | None = None,
    global_prefix: int = 0,
) -> AttnMask:
    """`block_causal` with documents cut into frames of ``block`` tokens; the last may be short.

    Args:
        lengths: tokens of each document ``[D]``.
        block: tokens of a frame, one number or one per document ``[D]``.
        window: as in `block_causal`, in frames.
        global_prefix: as in `block_causal`, in frames.

    Raises:
        ValueError: ``block`` is not positive or of another number than the documents; or as `block_causal`.
    """
    counts, frames = cut_evenly("block", lengths, block)
    return block_causal(
        frames, frames_per_document=counts, window=window, global_prefix=global_prefix
    )


def chunked_causal(lengths: Any, chunk: Any) -> AttnMask:
    """Causal inside chunks of ``chunk`` tokens that are counted from the start of each document.

    The local attention of Llama 4: a token sees no key of an earlier chunk.

    Args:
        lengths: tokens of each document ``[D]``.
        chunk: tokens of a chunk, one number or one per document ``[D]``.

    Raises:
        ValueError: ``chunk`` is not positive or of another number than the documents.
    """
    return varlen(cut_evenly("chunk", lengths, chunk)[1], causal=True)


def prefix_lm(lengths: Any, prefix_lengths: Any) -> AttnMask:
    """Causal documents whose first tokens all see each other.

    Args:
        lengths: tokens of each document ``[D]``, prefix included.
        prefix_lengths: tokens of each prefix ``[D]``, at most those of its document.

    Raises:
        ValueError: a prefix is longer than its document, or they are not equally many.
    """
    lengths = checks.lengths("lengths", lengths)
    prefixes = checks.lengths("prefix_lengths", prefix_lengths)
    if len(lengths) != len(prefixes):
        raise ValueError(
            "lengths and prefix_lengths must be equally many; "
            f"got {len(lengths)} and {len(prefixes)}"
        )
    bad = np.flatnonzero(prefixes > lengths)
    if len(bad):
        i = bad[0]
        raise ValueError(
            f"prefix_lengths[{i}] = {prefixes[i]} is longer than lengths[{i}] = {lengths[i]}"
        )
    start, end = starts_and_ends(lengths)
    low, high = _no_band(len(lengths))
    among = np.stack([start, start + prefixes, start, start + prefixes, low, high], axis=1)
    after = np.stack([start + prefixes, end, start, end, low, np.zeros_like(high)], axis=1)
    total = int(lengths.sum())
    return AttnMask(np.concatenate([among, after]), total, total, disjoint=True)


def shared_question(
    question_lengths: Any, answer_lengths: Sequence[Any], *, causal: bool = True
) -> AttnMask:
    """Documents of one question and several answers, each of which sees the question and itself.

    A document lies in the sequence as its question, then its answers (reward models, multi-sample
    RL).

    Args:
        question_lengths: tokens of each question ``[D]``.
        answer_lengths: for each document the tokens of its answers, D sequences.
        causal: tokens see no later token of their question or answer.

    Raises:
        ValueError: questions and groups of answers are not equally many, or a length is negative.
    """
    questions = checks.lengths("question_lengths", question_lengths)
    if len(answer_lengths) != len(questions):
        raise ValueError(
            "answer_lengths must hold one sequence per question; "
            f"got {len(answer_lengths)} for {len(questions)}"
        )
    per_question = [
        checks.lengths(f"answer_lengths[{i}]", answer) for i, answer in enumerate(answer_lengths)
    ]
    counts = np.array([len(part) for part in per_question], np.int64)
    answers = np.concatenate([np.zeros(0, np.int64), *per_question])
    first_answer = starts_and_ends(counts)[0]
    # Parts in the order of the sequence: each question stands before the first of its answers.
    part_lengths = np.insert(answers, first_answer, questions)
    start, end = starts_and_ends(part_lengths)
    is_question = np.zeros(len(part_lengths), bool)
    is_question[first_answer + np.arange(len(questions))] = True
    question = np.cumsum(is_question) - 1
    question_start, question_end = start[is_question][question], end[is_question][question]

    low, high = _no_band(len(start))
    itself = np.stack([start, end, start, end, low, high * (not causal)], axis=1)
    its_question = np.stack([start, end, question_start, question_end, low, high], axis=1)
    rows = np.concatenate([itself, its_question[~is_question]])
    total = int(part_lengths.sum())
    return AttnMask(rows, total, total, disjoint=True).simplify()


def starts_and_ends(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where parts begin and end when they lie one after the other."""
    end = np.cumsum(lengths)
    return end - lengths, end


def cut_evenly(name: str, lengths: Any, block: Any) -> tuple[np.ndarray, np.ndarray]:
    """Cuts each of ``lengths [D]`` into blocks: their numbers ``[D]`` and all their lengths."""
    lengths = checks.lengths("lengths", lengths)
    block = checks.integers(name, block, ndim=np.ndim(block))
    if block.ndim > 1 or (block.ndim == 1 and len(block) != len(lengths)):
        raise ValueError(f"{name} must be one number or one per document; got shape {block.shape}")
    if (block <= 0).any():
        raise ValueError(f"{name} must be positive; got {block.tolist()}")
    block = np.broadcast_to(block, lengths.shape)
    counts = -(-lengths // block)
    owner = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return counts, np.minimum(block[owner], lengths[owner] - within * block[owner])


def _no_band(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(count, -UNBOUNDED), np.full(count, UNBOUNDED)
