"""Timing of calls that run asynchronously on a device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from processes import from_all


def seconds(
    call: Callable[[], Any],
    wait: Callable[[Any], Any] = jax.block_until_ready,
    *,
    budget_s: float = 0.12,
    repeats: int = 5,
    most: int = 200,
) -> float:
    """Median over ``repeats`` of the mean time of back-to-back calls, in seconds, warmed up.

    Args:
        call: issues the work and returns what ``wait`` waits for.
        wait: waits for a result, and with it for all work issued before on the same stream.
        budget_s: time that all repeats together may take, at least one call each.
        repeats: how many means to take.
        most: most calls of one repeat.
    """
    wait(call())
    once = mean_seconds(call, wait, 1)
    count = _agreed(min(max(1, int(budget_s / repeats / once)), most))
    return statistics.median(mean_seconds(call, wait, count) for _ in range(repeats))


def steady_seconds(
    call: Callable[[], Any],
    wait: Callable[[Any], Any] = jax.block_until_ready,
    *,
    lead_s: float = 0.1,
    budget_s: float = 0.1,
) -> float:
    """Time of back-to-back calls on a card whose pace these calls themselves have settled, in seconds.

    A GPU that was idle runs up to 15 % faster for about a tenth of a second; one that comes from work which
    draws more power needs as long to recover. So the calls run for ``lead_s`` before any are timed.

    Args:
        call, wait: see `seconds`.
        lead_s: how long calls run before.
        budget_s: how long they are timed: the median of five means, of one call at least; of fewer means
            where those would take ten times as long.
    """
    wait(call())
    once = mean_seconds(call, wait, 1)

    def run(long_s: float) -> float:
        return mean_seconds(call, wait, _agreed(max(1, int(long_s / once))))

    if once < lead_s:
        once = run(lead_s)
    rounds = _agreed(min(max(1, int(10 * budget_s / once)), 5))
    return statistics.median(run(budget_s / 5) for _ in range(rounds))


def mean_seconds(call: Callable[[], Any], wait: Callable[[Any], Any], count: int) -> float:
    """Time of a call among ``count`` back-to-back ones, in seconds; see `seconds`."""
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    wait(result)
    return (time.perf_counter() - start) / count


def _agreed(count: int) -> int:
    """The number of the first process: calls that wait for each other must be as many in all."""
    return from_all(count, "calls")[0]


def matmul_tflops() -> float:
    """Rate of a square bfloat16 product of size 8192: the ceiling of the card as it is now."""
    size = 8192 if jax.default_backend() == "gpu" else 256
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / seconds(lambda: product(a, a)) / 1e12
