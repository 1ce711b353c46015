"""Masks for the planner's benchmark: packed documents with log-normal lengths, one family each.

The distributions are those of the published comparison in docs/planner.md; seeds are this file's own.
``load_families`` takes the families of another file instead, when its exact masks are wanted.
"""

import importlib.util
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from magi_jax import masks
from magi_jax.masks import AttnMask

WINDOW = 1024
GLOBAL_ROWS = 2048

MaskMaker = Callable[[int, int], AttnMask]


def _generator(name: str, seq_len: int, seed: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), seq_len, seed])


def _lengths(rng: np.random.Generator, seq_len: int, draw: Callable[[], float], least: int):
    """Lengths from ``draw``, within ``[least, seq_len / 4]``, that add up to ``seq_len``; shuffled."""
    lengths, left = [], seq_len
    while left > 0:
        length = int(np.clip(draw(), least, max(seq_len // 4, least)))
        lengths.append(min(length, left))
        left -= lengths[-1]
    return rng.permutation(np.array(lengths))


def _documents(kind: str, seq_len: int, seed: int, least: int = 16) -> np.ndarray:
    """Document lengths: a long tail (half of the tokens in long documents), short, tiny or long ones."""
    rng = _generator(kind, seq_len, seed)
    median, sigma = {"short": (560, 1.2), "tiny": (200, 0.7), "long": (12288, 0.9)}.get(
        kind, (560, 1.2)
    )

    def draw() -> float:
        is_long = kind == "tail" and rng.random() < 0.03
        return rng.lognormal(np.log(16384 if is_long else median), sigma)

    return _lengths(rng, seq_len, draw, least)


def _block_causal(seq_len: int, seed: int) -> AttnMask:
    lengths = _documents("long", seq_len, seed, 1024)
    blocks = _generator("blocks", seq_len, seed).integers(1024, 4097, len(lengths))
    return masks.uniform_block_causal(lengths, blocks)


def _block_causal_global(seq_len: int, seed: int) -> AttnMask:
    own = seq_len - GLOBAL_ROWS
    packed = _block_causal(own, seed).shift(0, 0, seq_len, seq_len)
    return packed | masks.global_rows(seq_len, rows=(own, seq_len))


def _prefix_lm(seq_len: int, seed: int) -> AttnMask:
    lengths = _documents("long", seq_len, seed, 256)
    share = _generator("prefixes", seq_len, seed).uniform(0.1, 0.6, len(lengths))
    return masks.prefix_lm(lengths, np.maximum((lengths * share).astype(int), 1))


def _shared_question(seq_len: int, seed: int) -> AttnMask:
    rng = _generator("questions", seq_len, seed)
    slices, at = [], 0

    def draw(median: float, sigma: float, least: int, most: int) -> int:
        length = int(np.clip(rng.lognormal(np.log(median), sigma), least, most))
        return min(length, seq_len - at)

    while at < seq_len:
        question = (at, at + draw(4096, 0.8, 256, seq_len // 8))
        slices.append((question, question, 1))
        at = question[1]
        for _ in range(int(rng.integers(4, 17))):
            if at >= seq_len:
                break
            answer = (at, at + draw(1024, 0.6, 64, seq_len // 16))
            slices += [(answer, question, 0), (answer, answer, 1)]
            at = answer[1]
    queries, keys, types = zip(*slices, strict=True)
    return AttnMask.from_slices(list(queries), list(keys), list(types), seq_len)


FAMILIES: dict[str, MaskMaker] = {
    "full": lambda s, _: masks.full(s),
    "causal": lambda s, _: masks.causal(s),
    "varlen_full": lambda s, seed: masks.varlen(_documents("tail", s, seed)),
    "varlen_causal": lambda s, seed: masks.varlen(_documents("tail", s, seed), causal=True),
    "varlen_causal_short": lambda s, seed: masks.varlen(_documents("short", s, seed), causal=True),
    "swa_causal": lambda s, _: masks.local(s, window=(WINDOW - 1, 0)),
    "varlen_block_causal": _block_causal,
    "block_causal_global": _block_causal_global,
    "shared_question": _shared_question,
    "prefix_lm": _prefix_lm,
    "bicausal_window": lambda s, seed: masks.varlen(
        _documents("tail", s, seed), window=(WINDOW, WINDOW)
    ),
    "varlen_causal_tiny": lambda s, seed: masks.varlen(_documents("tiny", s, seed), causal=True),
}


def load_families(path: Path) -> dict[str, MaskMaker]:
    """Families of a Python file with ``make(name, seq_len, seed) -> [A, 5]`` of (q, k, type) slices."""
    spec = importlib.util.spec_from_file_location("planner_workloads", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def maker(name: str) -> MaskMaker:
        def make(seq_len: int, seed: int) -> AttnMask:
            rows = module.make(name, seq_len, seed)
            return AttnMask.from_slices(rows[:, 0:2], rows[:, 2:4], rows[:, 4], seq_len)

        return make

    return {name: maker(name) for name in FAMILIES}
