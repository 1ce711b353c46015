"""Times pieces of work on one GPU."""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from timing import matmul_tflops

from magi_jax.ops import get_implementation
from magi_jax.plan.slice_table import build_table, exact_spec
from magi_jax.plan.spec import TableSpec, bucket
from magi_jax.plan.tables import SliceTable
from scaling.orders import Order
from scaling.work import ADDING, HEAD_DIM, PARTIAL, Piece

BLOCK = 64  # pieces between two looks at the pace of the card
SLOW = 0.8  # of the fastest pace that was seen; what was timed below is timed again, or not used
WARM_US = 250e3  # of calls before the first timed one of a block, which follows a pause
LEAD_US, TIMED_US = 60e3, 2e3  # of calls of a piece, untimed until the pace is theirs, then timed


def time_orders(
    orders: dict[str, Order], budget_s: float, implementation: str | None
) -> dict[str, dict[str, float]]:
    """Microseconds of passes by piece, as many pieces as the budget allows.

    A card at rest runs up to 15 % faster for a tenth of a second than it can at the limit of its power, so
    a call of 20 ms would seem faster than the same work in one of 200 ms. Pieces are timed on a card that
    does not rest, each right after so many untimed calls of its own that the pace is theirs. A matrix
    product between blocks tells whether others used the card.
    """
    started = time.perf_counter()
    bench = Bench(get_implementation(implementation))
    found: dict[str, dict[str, float]] = {}
    waiting, fastest = list(orders), 0.0
    while waiting:
        block, waiting = waiting[:BLOCK], waiting[BLOCK:]
        tables = {key: device_table(orders[key].piece) for key in block}
        bench.compile((orders[key].piece, table) for key, table in tables.items())
        tables = jax.block_until_ready(jax.device_put(tables))
        pace = [_pace()]
        bench.warm(orders[block[0]].piece, tables[block[0]])
        times = {}
        for key in block:
            if time.perf_counter() - started > budget_s:
                waiting = []
                break
            times[key] = bench.measure(*orders[key], tables[key])
        pace.append(_pace())
        fastest = max(fastest, *pace)
        for key, microseconds in times.items():
            found[key] = {**microseconds, "matmul": min(pace)}
        used = time.perf_counter() - started
        print(f"{len(found)} of {len(orders)}, {used:.0f} s, {bench.programs} programs,"
              f" matmul {pace[0]:.0f} to {pace[1]:.0f}", flush=True)  # fmt: skip
        if not waiting:  # again what was timed while the card was slow
            waiting = [key for key, t in found.items() if t["matmul"] < SLOW * fastest]
            waiting = waiting if used < budget_s and len(waiting) < len(found) else []
    return found


def _pace() -> float:
    """TFLOP/s of a matrix product on a GPU; elsewhere nobody times for the figures' sake."""
    return matmul_tflops() if jax.default_backend() == "gpu" else 1.0


class Operands(NamedTuple):
    """What the passes of a piece read, on the device, or their shapes."""

    q: Any
    k: Any
    v: Any
    dout: Any
    delta: Any


class Bench:
    """Operands and programs, made once for each shape."""

    def __init__(self, implementation):
        self.implementation = implementation
        self.arrays: dict[tuple, jax.Array] = {}
        self.made: dict[tuple, tuple] = {}

    @property
    def programs(self) -> int:
        """Shapes for which programs were made."""
        return len(self.made)

    def compile(self, work: Iterable[tuple[Piece, SliceTable]]) -> None:
        """Compiles what pieces need and is not there, side by side."""
        new = {_kind(piece, table): (piece, table) for piece, table in work}
        new = {kind: found for kind, found in new.items() if kind not in self.made}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(lambda found: self._compile(*found), new.values())
            self.made.update(zip(new, compiled, strict=True))

    def measure(
        self, piece: Piece, passes: Iterable[str], table: SliceTable | None = None
    ) -> dict[str, float]:
        """Microseconds of the given passes; ``table`` is what `device_table` gives, if it is there."""
        table = device_table(piece) if table is None else table
        self.compile([(piece, table)])
        calls = dict(zip(("forward", "backward"), self._calls(piece, table), strict=True))
        wanted = [which for which in calls if which in passes]
        jax.block_until_ready(calls[wanted[0]]())
        return {which: mean_us(calls[which]) for which in wanted}

    def warm(self, piece: Piece, table: SliceTable) -> None:
        """Keeps the card busy with a piece until its pace has settled."""
        run_forward, _ = self._calls(piece, table)
        started = time.perf_counter()
        while (time.perf_counter() - started) * 1e6 < WARM_US:
            jax.block_until_ready(run_forward())

    def _calls(self, piece: Piece, table: SliceTable) -> tuple[Callable, Callable]:
        """Calls of both passes, whose programs are there."""
        forward, backward = self.made[_kind(piece, table)]
        table = jax.device_put(table)
        operands = self._operands(piece, table, self._array)
        # What a call adds to is given away each time, as inside a step, where it is never copied.
        out, dq = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _sums(piece, operands))
        state: dict[str, Any] = {"lse": None, "out": out, "dq": dq}

        def run_forward():
            result = forward(operands, table, state["out"])
            state["lse"] = result[1]
            state["out"] = None if out is None else result[:2]
            return result

        def run_backward():
            if state["lse"] is None:
                run_forward()
            result = backward(operands, state["lse"], table, state["dq"])
            state["dq"] = None if dq is None else result[0]
            return result

        return run_forward, run_backward

    def _operands(self, piece: Piece, table: SliceTable, make: Callable) -> Operands:
        q_shape = table.q_len, piece.heads, HEAD_DIM
        kv_shape = table.k_len, piece.kv_heads, HEAD_DIM
        return Operands(
            make("q", q_shape, jnp.bfloat16),
            make("k", kv_shape, jnp.bfloat16),
            make("v", kv_shape, jnp.bfloat16),
            make("dout", q_shape, jnp.bfloat16),
            make("delta", q_shape[:2], jnp.float32),
        )

    def _array(self, name: str, shape: tuple[int, ...], dtype) -> jax.Array:
        """Normal values, the same for equal names and shapes."""
        if (name, shape) not in self.arrays:
            key = jax.random.key(sum(map(ord, name)))
            self.arrays[name, shape] = jax.jit(jax.random.normal, static_argnums=(1, 2))(
                key, shape, dtype
            )
        return self.arrays[name, shape]

    def _compile(self, piece: Piece, table: SliceTable) -> tuple[Callable, Callable]:
        """Forward and backward of the shapes of a piece."""
        operands = self._operands(piece, table, lambda _, *kind: jax.ShapeDtypeStruct(*kind))
        lse = jax.ShapeDtypeStruct(operands.delta.shape, jnp.float32)
        out, dq = _sums(piece, operands)
        forward, backward = self._make(piece.result)
        return (
            forward.lower(operands, table, out).compile(),
            backward.lower(operands, lse, table, dq).compile(),
        )

    def _make(self, result: str) -> tuple:
        options = {"scale": HEAD_DIM**-0.5, "logits_soft_cap": 0.0}
        dtype = jnp.float32 if result in PARTIAL else jnp.bfloat16

        def forward(x: Operands, table, out):
            return self.implementation.forward(
                x.q, x.k, x.v, table, accumulate=out, out_dtype=dtype, **options
            )

        def backward(x: Operands, lse, table, dq):
            return self.implementation.backward(
                x.dout, x.q, x.k, x.v, lse, x.delta, table,
                dkv_dtype=dtype, accumulate=dq, **options,
            )  # fmt: skip

        return jax.jit(forward, donate_argnums=2), jax.jit(backward, donate_argnums=3)


def _sums(piece: Piece, x: Operands) -> tuple:
    """Shapes of what the calls of a piece add to: ``(out, lse)`` and dQ, or None."""
    if piece.result not in ADDING:
        return None, None
    dtype = x.q.dtype if piece.result == "late" else jnp.float32
    out = jax.ShapeDtypeStruct(x.q.shape, dtype)
    lse = jax.ShapeDtypeStruct(x.delta.shape, jnp.float32)
    return (out, lse), jax.ShapeDtypeStruct(x.q.shape, jnp.float32)


def _kind(piece: Piece, table: SliceTable) -> tuple:
    """What a program depends on."""
    shapes = tuple(leaf.shape for leaf in jax.tree.leaves(table))
    return table.q_len, table.k_len, piece.heads, piece.kv_heads, piece.result, shapes


def device_table(piece: Piece) -> SliceTable:
    """The kernel table of a piece, padded so that few shapes occur."""
    q_len = piece.q_len if piece.q_len % 8192 == 0 else bucket(piece.q_len, 128)
    k_len = bucket(piece.k_len, 128)
    slices = piece.slices.astype(np.int64)
    sizes = slices, np.zeros(len(slices), np.int64), 1, q_len, k_len, 128, "compiled"
    need = exact_spec(build_table(*sizes))
    capacities = need.slices, need.query_runs, need.query_ids, need.key_runs, need.key_ids
    made = build_table(*sizes, TableSpec(q_len, k_len, 128, *map(_roomy, capacities)))
    return jax.tree.map(lambda leaf: leaf[0], made)


def _roomy(size: int) -> int:
    """The next power of eight from 4096 on."""
    power = 4096
    while power < size:
        power *= 8
    return power


def mean_us(call: Callable) -> float:
    """Microseconds of a call among back-to-back ones, right after others that are not timed.

    What the host takes to begin and to see the end is in one call as in many, and taken out.
    """

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) * 1e6

    once = run(1)
    if once > LEAD_US:
        return run(1)
    run(int(LEAD_US / once))
    count = max(int(TIMED_US / once), 1)
    pairs = [(run(1), run(count + 1)) for _ in range(3)]
    return statistics.median(many - one for one, many in pairs) / count


def call_seconds(us: float) -> float:
    """What it takes to time a call of so many microseconds."""
    calls = 2.5 * us if us > LEAD_US else LEAD_US + 3 * max(us, TIMED_US) + 5 * us
    return calls / 1e6
