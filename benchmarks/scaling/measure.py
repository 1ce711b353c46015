"""Times pieces of work on one GPU: which call when, how often, and what the visits to it say."""

import statistics
import time
from typing import Any

import jax
from timing import matmul_tflops

from magi_jax.ops import get_implementation
from scaling.bench import FILL_US, LEAD_US, LONG_US, TIMED_US, Bench
from scaling.orders import Order
from scaling.padded import device_table
from scaling.work import Piece

BLOCK = 192  # pieces between two looks at the pace of the card
SLOW = 0.8  # of the fastest pace that was seen; what was timed below is timed again, or not used
WHOLE = 2  # slices of a mask that has hardly any edges
VISITS = 2  # to a piece, in one order and back
# On regular masks strategies differ by less than two visits to a call do: so there are more to long calls, of
# at least so many pairs in all heads, over whole masks.
LONG_VISITS, LONG_PAIRS = 4, 2**31


def time_orders(
    orders: dict[str, Order], budget_s: float, implementation: str | None
) -> dict[str, dict[str, Any]]:
    """Microseconds of passes by piece, as many pieces as the budget allows; and those of each visit.

    A card at rest runs up to 15 % faster for a tenth of a second than it can at the limit of its power, so
    a call of 20 ms would seem faster than the same work in one of 200 ms. Pieces are timed on a card that
    does not rest, each after untimed calls of its own, and before others that keep the card busy while the
    host sees to the next piece. In a block, calls that should run at like rates follow on each other, in one
    direction and then in the other: neighbours leave each other the pace that is theirs, and what drifts
    does so for all. A matrix product between blocks tells whether others used the card.
    """
    started = time.perf_counter()
    bench = Bench(get_implementation(implementation))
    found: dict[str, dict[str, Any]] = {}
    waiting, fastest = list(orders), 0.0
    while waiting:
        block, waiting = waiting[:BLOCK], waiting[BLOCK:]
        tables = {key: device_table(orders[key].piece) for key in block}
        bench.compile((*orders[key], table) for key, table in tables.items())
        tables = jax.block_until_ready(jax.device_put(tables))
        pace = [_pace()]
        shortest = min(block, key=lambda key: orders[key].piece.area)
        bench.warm(orders[shortest].piece, tables[shortest])
        ready = time.perf_counter() - started
        times: dict[str, dict[str, list[float]]] = {}
        for key, which in _walk(block, orders):
            if time.perf_counter() - started > budget_s:
                waiting = []
                break
            us = bench.measure(orders[key].piece, which, tables[key])
            times.setdefault(key, {}).setdefault(which, []).append(us)
        pace.append(_pace())
        fastest = max(fastest, *pace)
        for key, visits in times.items():
            found[key] = {
                **{which: settled_us(us) for which, us in visits.items()},
                "visits": visits,
                "matmul": min(pace),
            }
        used = time.perf_counter() - started
        print(f"{len(found)} of {len(orders)}, {ready:.0f} to {used:.0f} s, {bench.programs} programs,"
              f" matmul {pace[0]:.0f} to {pace[1]:.0f}, host {bench.host_us:.0f} us", flush=True)  # fmt: skip
        if not waiting:  # again what was timed while the card was slow
            waiting = [key for key, t in found.items() if t["matmul"] < SLOW * fastest]
            waiting = waiting if used < budget_s and len(waiting) < len(found) else []
    return found


def _walk(block: list[str], orders: dict[str, Order]) -> list[tuple[str, str]]:
    """Pieces and passes as they are visited: by pass, whole masks apart from cut ones, which draw less
    power and leave the card a faster pace, and keys per query, which say most of the rate.
    """

    def rate(call: tuple[str, str]) -> tuple[str, bool, float]:
        piece = orders[call[0]].piece
        return call[1], len(piece.slices) > WHOLE, piece.area / piece.q_len

    once = sorted(((key, which) for key in block for which in orders[key].passes), key=rate)
    walk = []
    for visit in range(LONG_VISITS):
        due = [call for call in once if visit < visits_to(orders[call[0]].piece)]
        walk += due[:: -1 if visit % 2 else 1]
    return walk


def visits_to(piece: Piece) -> int:
    """How often a pass of a piece is timed."""
    is_long = len(piece.slices) <= WHOLE and piece.area * piece.heads >= LONG_PAIRS
    return LONG_VISITS if is_long else VISITS


def settled_us(visits: list[float]) -> float:
    """What the visits to a call say: the mean; of a long call, which is but one in each, without the slowest,
    since memory that is asked for the first time holds one up.
    """
    is_one = len(visits) > 1 and min(visits) > LONG_US
    return statistics.mean(sorted(visits)[:-1] if is_one else visits)


def _pace() -> float:
    """TFLOP/s of a matrix product on a GPU; elsewhere nobody times for the figures' sake."""
    return matmul_tflops() if jax.default_backend() == "gpu" else 1.0


def call_seconds(us: float, visits: int) -> float:
    """What it takes to time a call of so many microseconds so often."""
    calls = us if us > LONG_US else 2 * us + max(LEAD_US, us) + max(TIMED_US, us) + FILL_US
    return visits * calls / 1e6
