"""Timing of several things that are compared, in short turns on cards that do not rest."""

import statistics
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from timing import mean_seconds

SETTLE_S, TURN_S = 0.3, 0.12  # before what is compared, and of each turn
TURNS, LONG_TURNS = 4, 2  # of everything that is compared; the latter of calls that are longer
LEAST_CALLS = 2  # of a turn: the host takes 2 to 3 ms to begin after a wait


def in_turns(calls: dict[str, dict[str, Callable]]) -> dict[str, dict[str, float]]:
    """Seconds of each pass of each of them, a short while each in turns.

    A card at the limit of its power changes its pace by a tenth within a tenth of a second, and by some per
    cent within seconds. So calls follow each other without rest, before any are timed too, and what is
    compared takes turns within that time.
    """
    times: dict[str, dict[str, float]] = {which: {} for which in calls}
    for name in ("forward", "backward"):
        once = {which: min(run(each[name], 1) for _ in range(2)) for which, each in calls.items()}
        which = next(iter(calls))
        run(calls[which][name], _count(SETTLE_S, once[which]))
        measured: dict[str, list[float]] = {which: [] for which in calls}
        for _ in range(1 + (TURNS if max(once.values()) < TURN_S else LONG_TURNS)):
            for which, each in calls.items():
                once[which] = run(each[name], _count(TURN_S, once[which]))
                measured[which].append(once[which])
        for which, values in measured.items():
            times[which][name] = statistics.mean(values[1:])
    return times


def _count(time_s: float, once_s: float) -> int:
    return max(LEAST_CALLS, round(time_s / once_s))


def run(call: Callable, count: int) -> float:
    """Mean seconds of back-to-back calls, of the slowest process."""
    seconds = mean_seconds(call, jax.block_until_ready, count)
    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.process_allgather(np.float64(seconds)).max())
