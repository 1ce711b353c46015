"""What transfers, and what XLA does beside the kernels, cost; and kernel times laid out by rank."""

from typing import NamedTuple

import numpy as np

from scaling.work import (
    FAR_GBPS,
    FAR_LATENCY_US,
    HEAD_DIM,
    NEAR_GBPS,
    NEAR_LATENCY_US,
    NODE,
    NUM_HEADS,
)


class Machine(NamedTuple):
    """Rates of the links, in bytes per microsecond, and fixed costs in microseconds.

    Attributes:
        near, far: what one GPU receives, and at once sends, inside a node and across nodes.
        near_latency_us, far_latency_us: of one transfer or collective.
        memory: of a GPU's own memory, for merging partial results.
        node: GPUs of a node.
        grad_bytes: bytes of an element of dK and dV on the wire for our strategy; the others send two.
    """

    near: float = NEAR_GBPS * 1e3
    far: float = FAR_GBPS * 1e3
    near_latency_us: float = NEAR_LATENCY_US
    far_latency_us: float = FAR_LATENCY_US
    memory: float = 4000e3
    node: int = NODE
    grad_bytes: int = 4

    def move_us(self, near_bytes: float, far_bytes: float) -> float:
        """Time of bytes to ranks of the node beside bytes across nodes; nothing takes none."""
        latency = self.far_latency_us if far_bytes else self.near_latency_us if near_bytes else 0
        return max(near_bytes / self.near, far_bytes / self.far) + latency


class Times(NamedTuple):
    """Kernel times of each call, microseconds ``[groups, steps]``, 0 where there is none.

    Attributes:
        forward, backward: of the two passes.
        travel_forward, travel_backward: of serving travelling queries, ``[ranks]``, if any travel.
    """

    forward: np.ndarray
    backward: np.ndarray
    travel_forward: np.ndarray | None = None
    travel_backward: np.ndarray | None = None

    def kernel_us(self, which: str) -> np.ndarray:
        """All kernels of each group in a pass."""
        travel = getattr(self, f"travel_{which}")
        return getattr(self, which).sum(axis=1) + (0.0 if travel is None else travel)


class Moves(NamedTuple):
    """Microseconds of transfers.

    Attributes:
        cast, reduce: of each stage, ``[stages, ranks]``; in two steps of that between nodes.
        within: casts and reduces inside nodes, ``[2, stages, ranks]``, of transfers in two steps.
        travel_out, travel_back: of travelling queries, ``[ranks]``, all their steps.
        near: of transfers in two steps, whether those of each stage take the step inside nodes alone.
    """

    cast: np.ndarray
    reduce: np.ndarray
    within: np.ndarray | None = None
    travel_out: np.ndarray | None = None
    travel_back: np.ndarray | None = None
    near: tuple[bool, ...] = ()


def elements(rows: int) -> int:
    """Numbers in rows of all query heads."""
    return rows * NUM_HEADS * HEAD_DIM


def cast_us(rows: int, machine: Machine) -> float:
    """Float32 results of all rows and heads to bfloat16."""
    return (4 + 2) * elements(rows) / machine.memory


def tail_us(rows: int, machine: Machine, parts: bool) -> float:
    """``delta`` from ``out`` and ``dout``; and dQ to bfloat16 where it is a sum of parts: a call by itself
    writes it so.
    """
    return 4 * elements(rows) / machine.memory + (cast_us(rows, machine) if parts else 0.0)
