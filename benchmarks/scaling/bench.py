"""Calls of passes on one GPU, and how long they take: operands and programs are made once for each shape."""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.ops import BackwardOperands
from magi_jax.plan.tables import SliceTable
from scaling.padded import device_table
from scaling.work import ADDING, HEAD_DIM, PARTIAL, Piece

WARM_US = 250e3  # of calls before the first timed one of a block, which follows a pause
LEAD_US, TIMED_US = 8e3, 8e3  # of calls of a piece, untimed until the pace is theirs, then timed
FILL_US = 5e3  # of calls behind those, while the host sees to the next
LONG_US = 60e3  # a call from here on needs no others before it, among calls like it
HOST_CALLS, HOST_SAMPLES = 9, 15  # by which the host's part of a sequence of calls is found
HOST_US = 1e6  # after which as many samples do as there are, where calls are long
POOL = 1 << 24  # different numbers in an operand, which repeats them
MOST_BYTES = 48 << 30  # of operands that are kept for later blocks


class Operands(NamedTuple):
    """What the passes of a piece read, on the device, or their shapes."""

    q: Any
    k: Any
    v: Any
    dout: Any
    delta: Any


class Bench:
    """Operands and programs, made once for each shape.

    Args:
        implementation: whose kernels are timed.
        device: where; the default one where it is None. Whoever measures on another one does so under
            ``jax.default_device`` of it.
    """

    def __init__(self, implementation, device: jax.Device | None = None):
        self.implementation = implementation
        self.device = device
        self.arrays: dict[tuple, jax.Array] = {}
        self.made: dict[tuple, Callable] = {}
        self.pool = np.random.default_rng(0).standard_normal(POOL, np.float32)
        self.values: dict[str, np.ndarray] = {}
        self.lse: dict[str, jax.Array] = {}
        self.ran: set[tuple] = set()
        self.host_us = 0.0

    @property
    def programs(self) -> int:
        """Programs that were made."""
        return len(self.made)

    def compile(self, work: Iterable[tuple[Piece, Iterable[str], SliceTable]]) -> None:
        """Compiles what passes of pieces need and is not there, side by side; lets go of many operands."""
        new = {
            (which, *_kind(piece, table)): (which, piece, table)
            for piece, passes, table in work
            for which in {"forward", *passes}  # the backward pass reads what the forward pass gives
        }
        new = {kind: found for kind, found in new.items() if kind not in self.made}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = pool.map(lambda found: self._compile(*found), new.values())
            self.made.update(zip(new, compiled, strict=True))
        self.lse.clear()
        if sum(array.nbytes for array in self.arrays.values()) > MOST_BYTES:
            self.arrays.clear()

    def measure(self, piece: Piece, which: str, table: SliceTable | None = None) -> float:
        """Microseconds of a pass among calls of it back to back; ``table`` is what `device_table` gives, and
        its programs are there, where it is given.
        """
        if table is None:
            table = device_table(piece)
            self.compile([(piece, (which,), table)])
            self.warm(piece, table)
        call = self._call(piece, which, table)
        first = max(run_us(call, 1) - self.host_us, 1.0)
        ran = (program := (which, *_kind(piece, table))) in self.ran
        self.ran.add(program)
        if first > LONG_US and ran:  # what was issued before was but a small part of it
            return first
        once = max(run_us(call, 1) - self.host_us, 1.0)
        if once > LONG_US:
            return once
        run_us(call, max(int(LEAD_US / once), 1))
        count = max(int(TIMED_US / once), 1)
        us = max(run_us(call, count) - self.host_us, 1.0) / count
        for _ in range(int(FILL_US / us)):
            call()
        return us

    def call(self, piece: Piece, which: str) -> Callable:
        """A call of a pass that is ready to run."""
        table = device_table(piece)
        self.compile([(piece, (which,), table)])
        return self._call(piece, which, table)

    def warm(self, piece: Piece, table: SliceTable) -> None:
        """Keeps the card busy with a short piece until its pace has settled, and finds what the host takes to
        begin a sequence of calls and to see its end.
        """
        call = self._call(piece, "forward", table)
        started = time.perf_counter()
        while (time.perf_counter() - started) * 1e6 < WARM_US:
            run_us(call, HOST_CALLS)
        pairs: list[tuple[float, float]] = []
        while len(pairs) < HOST_SAMPLES and sum(map(sum, pairs)) < HOST_US:
            pairs.append((run_us(call, 1), run_us(call, HOST_CALLS)))
        each = [(HOST_CALLS * one - many) / (HOST_CALLS - 1) for one, many in pairs]
        self.host_us = max(statistics.median(each), 0.0)

    def _call(self, piece: Piece, which: str, table: SliceTable) -> Callable:
        """A call of a pass, by programs that are there; what the backward pass reads is made before."""
        forward, backward = (
            self.made.get((w, *_kind(piece, table))) for w in ("forward", "backward")
        )
        table = jax.device_put(table)
        operands = self._operands(piece, table, self._array)
        # What a call adds to is given away each time, as inside a step, where it is never copied.
        out, dq = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _sums(piece, operands))
        state: dict[str, Any] = {"out": out, "dq": dq}

        def run_forward():
            result = forward(operands, table, state["out"])
            state["out"] = None if out is None else result[:2]
            return result

        def run_backward():
            result = backward(operands, self.lse[piece.key], table, state["dq"])
            state["dq"] = None if dq is None else result[0]
            return result

        if which == "forward":
            return run_forward
        if piece.key not in self.lse:
            self.lse[piece.key] = jax.block_until_ready(run_forward()[1])
        return run_backward

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
        """Normal values from one pool, the same for equal names and shapes: nothing is compiled."""
        if name not in self.values:
            self.values[name] = np.roll(self.pool, sum(map(ord, name))).astype(dtype)
        if (name, shape) not in self.arrays:
            self.arrays[name, shape] = jax.device_put(np.resize(self.values[name], shape))
        return self.arrays[name, shape]

    def _compile(self, which: str, piece: Piece, table: SliceTable) -> Callable:
        """A pass of the shapes of a piece."""
        operands = self._operands(piece, table, lambda _, *kind: jax.ShapeDtypeStruct(*kind))
        lse = jax.ShapeDtypeStruct(operands.delta.shape, jnp.float32)
        out, dq = _sums(piece, operands)
        forward, backward = self._make(piece.result)
        with jax.default_device(self.device):  # a thread of a pool does not know its caller's
            if which == "forward":
                return forward.lower(operands, table, out).compile()
            return backward.lower(operands, lse, table, dq).compile()

    def _make(self, result: str) -> tuple:
        options = {"scale": HEAD_DIM**-0.5, "logits_soft_cap": 0.0}
        dtype = jnp.float32 if result in PARTIAL else jnp.bfloat16
        dq_dtype = jnp.bfloat16 if result == "final" else jnp.float32

        def forward(x: Operands, table, out):
            return self.implementation.forward(
                x.q, x.k, x.v, table, accumulate=out, out_dtype=dtype, **options
            )

        def backward(x: Operands, lse, table, dq):
            operands = BackwardOperands(x.dout, x.q, x.k, x.v, lse, x.delta)
            return self.implementation.backward(
                operands, table, dkv_dtype=dtype, dq_dtype=dq_dtype, accumulate=dq, **options
            )

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


def run_us(call: Callable, count: int) -> float:
    """Microseconds until so many calls, issued one after the other, are done."""
    start = time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) * 1e6
