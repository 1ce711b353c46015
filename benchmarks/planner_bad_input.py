"""Masks that nobody plans for: a plan or a clear error, within the time of any other batch."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from magi_jax import masks
from magi_jax.masks import AttnMask
from magi_jax.plan import PlanConfig, make_plan

CP = 64
# Of a plan of 300 to 600 slices, and of one of thousands of documents.
PLAN_MS, MANY_MS = 20.0, 25.0
# Tables of 190 MB: half of this is memory that is touched for the first time.
LONG_MS = 50.0
# A million slices are read, sorted into tables of 64 ranks and written, where no two of them are one.
MILLION_MS = 1000.0
IMBALANCE = 1.02
REPEATS = 5


class Case(NamedTuple):
    """One mask, and what is expected of it.

    Attributes:
        what: says what it is.
        mask: makes it.
        limit_ms: time that its plan may take.
        imbalance: that its plan may have; None where there are fewer tokens than ranks, or no area.
        error: part of the message that is expected instead of a plan.
        chunk_size: tokens of a chunk; None leaves them to the planner.
    """

    what: str
    mask: Callable[[], AttnMask]
    limit_ms: float = PLAN_MS
    imbalance: float | None = IMBALANCE
    error: str | None = None
    chunk_size: int | None = None


def _short_documents(count: int) -> AttnMask:
    lengths = np.random.default_rng(0).integers(1, 4, count)
    return masks.varlen(lengths, causal=True)


CASES = (
    Case("more ranks than chunks (32 of 1,024)", lambda: masks.causal(32_768), chunk_size=1024),
    Case("fewer tokens than ranks (40)", lambda: masks.causal(40), imbalance=None),
    Case("one token", lambda: masks.causal(1), imbalance=None),
    Case("no token", lambda: masks.empty(0), imbalance=None, error="at least one token"),
    Case("empty mask of 524,288 tokens", lambda: masks.empty(524_288), imbalance=None),
    Case(
        "mask that is not square",
        lambda: masks.full(512, 256),
        imbalance=None,
        error="self-attention",
    ),
    Case("one causal document of 524,288 tokens", lambda: masks.causal(524_288)),
    Case("one full document of 524,288 tokens", lambda: masks.full(524_288)),
    Case("one causal document of 500,009 tokens", lambda: masks.causal(500_009)),
    Case("one causal document of 4,194,304 tokens", lambda: masks.causal(4_194_304), LONG_MS),
    Case(
        "a window of 1,024 over 1,000,003 tokens",
        lambda: masks.local(1_000_003, window=(1023, 0)),
    ),
    Case(
        "1,000,000 documents of one token",
        lambda: masks.varlen(np.ones(1_000_000, int), causal=True),
        MANY_MS,
    ),
    Case("10,000 documents of 1 to 3 tokens", lambda: _short_documents(10_000), MANY_MS),
    Case("1,000,000 documents of 1 to 3 tokens", lambda: _short_documents(1_000_000), MILLION_MS),
)


def run_case(case: Case) -> dict:
    """What a mask is answered with, and the CPU time of that, the least of `REPEATS`."""
    mask, best, plan, error = case.mask(), float("inf"), None, None
    config = PlanConfig(ranks_per_node=8, chunk_size=case.chunk_size)
    for _ in range(REPEATS):
        started = time.process_time()
        try:
            plan = make_plan(mask, CP, config)
        except ValueError as problem:
            error = str(problem)
        best = min(best, time.process_time() - started)
    imbalance = None if plan is None else plan.report().imbalance
    answered = error is not None and case.error in error if case.error else error is None
    balanced = case.imbalance is None or (imbalance is not None and imbalance <= case.imbalance)
    return {
        "what": case.what,
        "plan_ms": best * 1e3,
        "limit_ms": case.limit_ms,
        "imbalance": imbalance,
        "error": error,
        "reached": answered and balanced and best * 1e3 <= case.limit_ms,
    }


def print_bad_input() -> list[dict]:
    """Runs all cases, prints them, and returns what they gave."""
    print(f"\nbad input, cp {CP}: CPU milliseconds, the least of five")
    rows = []
    for case in CASES:
        row = run_case(case)
        rows.append(row)
        found = f"imbalance {row['imbalance']:.4f}" if row["error"] is None else row["error"]
        state = "reached" if row["reached"] else "MISSED"
        print(
            f"  {row['what']:42} {row['plan_ms']:9.1f}   limit {row['limit_ms']:7g}   {state}   {found}"
        )
    return rows
