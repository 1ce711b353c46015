"""Timing of several things that are compared, in short turns on cards that do not rest."""

import collections
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable

import jax
import numpy as np
from processes import from_all
from timing import mean_seconds

SETTLE_S, TURN_S = 0.3, 0.02  # before what is compared, and of each turn, of one call at least
PASS_S = 1.4  # of all turns
LEAST_ROUNDS, MOST_ROUNDS = 8, 64  # of turns; the former of calls that are long
LONG_S = 0.02  # calls of which none leads a turn in untimed
AHEAD_S, MOST_AHEAD = 0.02, 8  # calls that are begun before the host waits for the first of them

Times = dict[str, dict[str, list[float]]]


def in_turns(calls: dict[str, dict[str, Callable]]) -> Times:
    """Seconds of each pass of each of them, one figure for each turn; the first has a turn more, at the end.

    A card at the limit of its power changes its pace by a tenth within a tenth of a second, and by some per
    cent within seconds. So what is compared takes turns within that time, and no device waits from the first
    turn to the last: the host, which takes 2 to 3 ms to begin after a wait, is some calls ahead, and a turn
    lasts from the end of the call before it, or of its own first one where calls are short, to the end of its
    last one.
    """
    times: Times = {which: {} for which in calls}
    for name in ("forward", "backward"):
        these = {which: each[name] for which, each in calls.items()}
        once = {which: min(run(call, 1) for _ in range(2)) for which, call in these.items()}
        for which, turns in _timed(these, once).items():
            times[which][name] = _slowest(turns)
    return times


def ratio(first: list[float], other: list[float]) -> tuple[float, float]:
    """Time of the first over that of another, and by how much this may be off (standard error).

    Each turn of the other is compared with the turns of the first before and after it; the mean is of these
    without the quarter that is least and the quarter that is greatest: now and then a card stalls for a
    third of a long call.
    """
    around = itertools.pairwise(first)
    each = sorted((a + b) / 2 / x for (a, b), x in zip(around, other, strict=True))
    cut = len(each) // 4
    kept = each[cut : len(each) - cut]
    # Those that are left out count as the outermost that are not.
    spread = statistics.stdev([kept[0]] * cut + kept + [kept[-1]] * cut)
    return statistics.mean(kept), spread * math.sqrt(len(each)) / len(kept)


def means(times: Times) -> dict[str, dict[str, float]]:
    """Mean seconds of a call of each, over the middle half of its turns."""
    return {
        which: {name: _middle_mean(turns) for name, turns in each.items()}
        for which, each in times.items()
    }


def _middle_mean(turns: list[float]) -> float:
    cut = len(turns) // 4
    return statistics.mean(sorted(turns)[cut : len(turns) - cut])


def run(call: Callable, count: int) -> float:
    """Mean seconds of back-to-back calls, of the slowest process."""
    return _slowest([mean_seconds(call, jax.block_until_ready, count)])[0]


def _timed(calls: dict[str, Callable], once: dict[str, float]) -> dict[str, list[float]]:
    """Mean seconds of a call in each turn."""
    first = next(iter(calls))
    turn_s = max(TURN_S, *once.values())  # turns of one length
    counts = {which: max(1, round(turn_s / seconds)) for which, seconds in once.items()}
    leads = {which: int(seconds < LONG_S) for which, seconds in once.items()}
    round_s = sum((counts[which] + leads[which]) * once[which] for which in calls)
    rounds = min(max(LEAST_ROUNDS, int(PASS_S / round_s)), MOST_ROUNDS)
    turns = [which for _ in range(rounds) for which in calls] + [first]
    settle = [calls[first]] * max(1, round(SETTLE_S / once[first]))
    order = [calls[which] for which in turns for _ in range(leads[which] + counts[which])]
    ahead = min(math.ceil(AHEAD_S / min(once.values())), MOST_AHEAD)
    ends = _ends(itertools.chain(settle, order), ahead)[len(settle) - 1 :]
    seconds: dict[str, list[float]] = {which: [] for which in calls}
    at = 0  # the end of the turn before
    for which in turns:
        begin = at + leads[which]
        at = begin + counts[which]
        seconds[which].append((ends[at] - ends[begin]) / counts[which])
    return seconds


def _ends(calls: Iterable[Callable], ahead: int) -> list[float]:
    """When each of these calls was done; the host has begun ``ahead`` more of them by then."""
    begun: collections.deque = collections.deque()
    ends = []

    def wait() -> None:
        jax.block_until_ready(begun.popleft())
        ends.append(time.perf_counter())

    for call in calls:
        begun.append(call())
        if len(begun) > ahead:
            wait()
    while begun:
        wait()
    return ends


def _slowest(seconds: list[float]) -> list[float]:
    """The largest of all processes, for each."""
    return np.max(from_all(seconds, "seconds"), axis=0).tolist()
