"""Named masks on which every implementation must agree with the oracle, and random ones."""

import numpy as np

from magi_jax import masks
from magi_jax.masks import AttnMask, bands
from magi_jax.masks.attn_slice import UNBOUNDED


def mask_cases(size: int) -> dict[str, AttnMask]:
    """All named masks: those of training at about ``size`` tokens, then edge cases.

    Most are square of ``size`` tokens; the few that are not say so by ``q_len`` and ``k_len``. The
    same size gives the same masks.

    Args:
        size: tokens, at least 32. A prime shows what fits no tile.
    """
    if size < 32:
        raise ValueError(f"mask cases need at least 32 tokens; got {size=}")
    return {**training_cases(size), **edge_cases(size)}


def training_cases(size: int) -> dict[str, AttnMask]:
    """The families of masks that models train with, ``size`` x ``size``."""
    rng = np.random.default_rng(size)
    few, many = random_lengths(rng, size, size / 3), random_lengths(rng, size, size / 20)
    frames = masks.uniform_block_causal(few, np.maximum(few // 4, 1))
    globals_at = (size - max(size // 8, 1), size)
    window, sinks = size // 6, max(size // 32, 1)
    return {
        "full": masks.full(size),
        "causal": masks.causal(size),
        "varlen_full": masks.varlen(few),
        "varlen_causal": masks.varlen(few, causal=True),
        "varlen_causal_short": masks.varlen(many, causal=True),
        "window_causal": masks.local(size, window=(window, 0)),
        "window_symmetric": masks.local(size, window=(window, window // 2)),
        "window_global_prefix": masks.local(
            size, window=(window, None), causal=True, global_prefix=sinks
        ),
        "varlen_window_causal": masks.varlen(few, causal=True, window=(window // 2, None)),
        "varlen_window_symmetric": masks.varlen(few, window=(window // 2, window // 2)),
        "block_causal": masks.uniform_block_causal([size], size // 5),
        "varlen_block_causal": frames,
        "block_causal_global": frames | masks.global_rows(size, rows=globals_at),
        "global_columns": masks.varlen(few, causal=True)
        | masks.global_columns(size, columns=(size // 2, size // 2 + sinks)),
        "chunked_causal": masks.chunked_causal(few, size // 7),
        "prefix_lm": masks.prefix_lm(few, few // 3),
        "shared_question": _shared_question(rng, size),
    }


def edge_cases(size: int) -> dict[str, AttnMask]:
    """What is legal and easily gets forgotten; of up to about ``size`` tokens."""
    half, third = size // 2, size // 3
    apart = masks.varlen([third, size - third], causal=True)
    return {
        "one_token": masks.causal(1),
        "one_query": masks.full(1, size),
        "one_key": masks.causal(size, 1),
        "nothing_visible": masks.empty(size),
        "rows_without_keys": apart.crop((0, size), (0, third)).shift(0, 0, k_len=size),
        "keys_nobody_sees": AttnMask.from_slices([(0, size)], [(third, half)], 0, size),
        "holes_in_both": masks.varlen([third], causal=True).shift(third, third, size, size),
        "prime_lengths": masks.varlen([31, 1, 17, 7, 13], causal=True),
        "zero_length_documents": masks.varlen([0, third, 0, 0, size - third, 0], causal=True),
        "length_one_documents": masks.varlen(np.ones(size, np.int64), causal=True),
        "square_bi_causal": AttnMask.from_slices([(0, size)], [(0, size)], 3, size),
        "inverse_causal": AttnMask.from_slices([(0, size)], [(0, size)], 2, size),
        "causal_wider_keys": masks.causal(half, size, offset=size - half),
        "causal_fewer_keys": masks.causal(size, half, offset=half - size),
        "cross_varlen": masks.varlen([third, 0, half], k_lengths=[half, 5, size]),
        "cross_varlen_window": masks.varlen(
            [third, half], k_lengths=[half, size], window=(third, 2), bottom_right=True
        ),
        "single_diagonal_ahead": AttnMask.from_slices([(0, size)], [(0, size)], [(3, 3)], size),
        "all_four_types": _all_four_types(size),
    }


def random_lengths(rng: np.random.Generator, total: int, mean: float) -> np.ndarray:
    """Long-tailed document lengths of about ``mean`` tokens, ``total`` in all, int64 ``[D]``."""
    lengths = []
    while total:
        length = int(np.ceil(mean * rng.lognormal(-0.5, 1.0)))
        lengths.append(min(length, total))
        total -= lengths[-1]
    return np.array(lengths, np.int64)


def random_mask(rng: np.random.Generator, q_len: int, k_len: int, max_slices: int = 8) -> AttnMask:
    """Disjoint random slices of all types and bands: ``max_slices`` at most, perhaps none."""
    kept = np.zeros((0, bands.NUM_COLUMNS), np.int64)
    target = int(rng.integers(0, max_slices + 1))
    for _ in range(4 * target):
        if len(kept) == target:
            break
        row = random_slice(rng, q_len, k_len)
        if (
            bands.area(row).all()
            and not bands.area(bands.intersect(kept, row[[0] * len(kept)])).any()
        ):
            kept = np.concatenate([kept, row])
    return AttnMask(kept, q_len, k_len)


def random_slice(rng: np.random.Generator, q_len: int, k_len: int) -> np.ndarray:
    """One tight slice ``[1, 6]`` of a mask type or with any band, perhaps without a cell."""
    q0, q1 = _random_range(rng, q_len)
    k0, k1 = _random_range(rng, k_len)
    kind = int(rng.integers(0, 6))
    if kind < 4:
        return masks.AttnSlice.from_type((q0, q1), (k0, k1), kind).row[None]
    low, high = np.sort(rng.integers(k0 - q1, k1 - q0 + 1, 2))
    if kind == 4 and rng.random() < 0.5:
        low = -UNBOUNDED
    return bands.tighten(np.array([[q0, q1, k0, k1, low, high]], np.int64))


def _random_range(rng: np.random.Generator, length: int) -> tuple[int, int]:
    """Short ranges as well as long ones, so that many slices find room."""
    size = int(np.ceil(length * rng.random() ** 2))
    start = int(rng.integers(0, length - size + 1))
    return start, start + size


def _shared_question(rng: np.random.Generator, size: int) -> AttnMask:
    questions, answers = [], []
    for length in random_lengths(rng, size, size / 2).tolist():
        questions.append(-(-length // 3))
        answers.append(random_lengths(rng, length - questions[-1], length / 6))
    return masks.shared_question(questions, answers)


def _all_four_types(size: int) -> AttnMask:
    """Four quadrants, one of each type, with uneven edges."""
    q, k = size // 2 + 1, size // 3
    q_ranges = [(0, q), (0, q), (q, size), (q, size)]
    k_ranges = [(0, k), (k, size), (0, k), (k, size)]
    types = [masks.MaskType.FULL, masks.MaskType.CAUSAL, masks.MaskType.INV_CAUSAL]
    return AttnMask.from_slices(q_ranges, k_ranges, [*types, masks.MaskType.BI_CAUSAL], size)
