"""The masks that strategies are compared on, with their documents."""

import functools
import json
import pathlib

import numpy as np
from baselines.base import Problem
from planner_masks import FAMILIES

from magi_jax import masks
from magi_jax.masks import AttnMask, bands

TOKENS_PER_RANK = 8192
DOCUMENTS = pathlib.Path(__file__).resolve().parents[1] / "kernel_documents.json"


def problems(
    num_ranks: int,
    tokens_per_rank: int = TOKENS_PER_RANK,
    only: list[str] | None = None,
    seed: int = 0,
) -> dict[str, Problem]:
    """Masks by name: the planner's families, and the documents of the kernels' benchmark, repeated."""
    seq_len = num_ranks * tokens_per_rank
    makers = {name: functools.partial(maker, seq_len, seed) for name, maker in FAMILIES.items()}
    lengths = np.array(json.loads(DOCUMENTS.read_text())["varlen"]["65536"])
    repeats = -(-seq_len // int(lengths.sum()))
    lengths = np.random.default_rng(seed).permutation(np.tile(lengths, repeats))
    ends = np.minimum(np.cumsum(lengths), seq_len)
    lengths = np.diff(ends, prepend=0)
    lengths = lengths[lengths > 0]
    makers["anchor_varlen_full"] = functools.partial(masks.varlen, lengths)
    makers["anchor_varlen_causal"] = functools.partial(masks.varlen, lengths, causal=True)
    if unknown := set(only or ()) - set(makers):
        raise ValueError(f"masks must be among {sorted(makers)}, got {sorted(unknown)}")
    made = {name: makers[name]() for name in only or makers}
    return {name: Problem(mask, document_lengths(mask)) for name, mask in made.items()}


def problem_names() -> list[str]:
    """Names of all masks."""
    return [*FAMILIES, "anchor_varlen_full", "anchor_varlen_causal"]


def document_lengths(mask: AttnMask) -> np.ndarray:
    """Lengths of the shortest stretches of the sequence that do not see each other, ``[D]``."""
    rows = mask.slices
    begin = np.minimum(rows[:, bands.Q_START], rows[:, bands.K_START])
    end = np.maximum(rows[:, bands.Q_END], rows[:, bands.K_END])
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    first = np.append(0, np.flatnonzero(begin[1:] >= end[:-1]) + 1)
    return np.diff(np.append(begin[first], mask.q_len), prepend=0)[1:]
