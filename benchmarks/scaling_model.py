"""When the ranks of a strategy are done: kernel times laid side by side with modelled transfers.

Every link is free of contention from other jobs; a rank sends and receives at the full rate at once. What a
strategy can hide behind its kernels is hidden. Where its code could be read in two ways, the better counts.
"""

from typing import NamedTuple

import numpy as np
from baselines import strategies
from scaling_work import HEAD_DIM, NODE, NUM_HEADS, NUM_KV_HEADS, Work

from magi_jax.solver import timeline
from magi_jax.solver.cost_model import CostModel


class Machine(NamedTuple):
    """Rates of the links, in bytes per microsecond, and fixed costs in microseconds.

    Attributes:
        near, far: what one GPU receives, and at once sends, inside a node and across nodes.
        near_latency_us, far_latency_us: of one transfer or collective.
        memory: of a GPU's own memory, for merging partial results.
        node: GPUs of a node.
        grad_bytes: bytes of an element of dK and dV on the wire for our strategy; the others send two.
    """

    near: float = 450e3
    far: float = 50e3
    near_latency_us: float = 10.0
    far_latency_us: float = 20.0
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


def step_us(name: str, work: Work, times: Times, num_ranks: int, machine: Machine) -> dict:
    """Microseconds of the slowest rank, ``{"forward": .., "backward": ..}``."""
    if work.traffic is not None:
        return staged_us(work, times, our_moves(work, machine), machine)
    strategy = strategies.make(name, num_ranks, NODE)
    if isinstance(strategy, strategies.HeadRing):
        return {
            "forward": _head_ring_us(strategy, work, times.forward, machine, False),
            "backward": _head_ring_us(strategy, work, times.backward, machine, True),
        }
    if isinstance(strategy, strategies.AllGather):
        gather = _gather_us(num_ranks, work.rows, machine)
        tail = _tail_us(work.rows, machine)
        return {
            "forward": gather + times.forward.max(),
            # Gathered again, and summed back to the owners.
            "backward": 2 * gather + times.backward.max() + tail,
        }
    moves = np.array(
        [[_gather_us(size, rows, machine)] * num_ranks
         for size, rows in zip(work.level_sizes, work.level_rows, strict=True)]
    )  # fmt: skip
    if work.level_sizes[0] == 1:
        moves = moves[1:]
    else:  # nothing to compute before the first keys arrive
        nothing = np.zeros((num_ranks, 1))
        both = (np.concatenate([nothing, t], axis=1) for t in (times.forward, times.backward))
        times = Times(*both)
    both_ways = {"forward": Moves(moves), "backward": Moves(moves, moves)}
    return staged_us(work, times, both_ways, machine, merged=False)


class Moves(NamedTuple):
    """Microseconds of casts and reduces ``[stages, ranks]``, and of travelling queries ``[ranks]``."""

    cast: np.ndarray
    reduce: np.ndarray | None = None
    travel_out: np.ndarray | None = None
    travel_back: np.ndarray | None = None


def our_moves(work: Work, machine: Machine) -> dict[str, Moves]:
    """Transfers of a plan by pass."""
    ranks = work.traffic.shape[1]
    node = min(machine.node, ranks)
    model = CostModel(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        grad_bytes=machine.grad_bytes,
        link_gbps=machine.near / 1e3,
        node_link_gbps=machine.far / 1e3,
        latency_us=machine.far_latency_us if ranks > NODE else machine.near_latency_us,
    )
    moves = {}
    for which, traffic, within in (
        ("forward", work.traffic, work.within),
        ("backward", work.backward_traffic, work.backward_within),
    ):
        # Of two levels, the second begins when the first is done.
        levels = [timeline.link_rows(rows, node) for rows in (traffic, within) if rows is not None]
        moves[which] = Moves(
            sum(model.cast_us(*rows) for rows in levels),
            sum(model.reduce_us(*rows) for rows in levels),
        )
        if work.travel_traffic is not None:
            rows = timeline.link_rows(work.travel_traffic, node)
            out, back = (
                model.move_us(*rows, size) for size in model.travel_bytes(which == "backward")
            )
            moves[which] = moves[which]._replace(travel_out=out, travel_back=back)
    return moves


def staged_us(
    work: Work, times: Times, moves: dict[str, Moves], machine: Machine, merged: bool = True
) -> dict[str, float]:
    """Ours, and the hybrid strategy: casts one stage ahead, reduces behind.

    The forward kernel merges by itself; dQ is added up by XLA, and so is what travelling queries bring.
    """
    add_us = 3 * 4 * work.rows * NUM_HEADS * HEAD_DIM / machine.memory if merged else 0.0
    ends = {}
    for which, cast in (("forward", 0.0), ("backward", add_us)):
        kernels, move = getattr(times, which), moves[which]
        back = np.zeros_like(move.cast) if which == "forward" else move.reduce
        travel, returned = getattr(times, f"travel_{which}"), 0.0
        if travel is not None:
            travel = timeline.TravelWork(move.travel_out, travel, move.travel_back)
            returned = add_us - cast  # counted by the timeline where stages are merged by XLA
        stages = timeline.DirectionWork(kernels.T, move.cast, back, cast, travel)
        ends[which] = timeline.simulate(stages).predicted_us + returned
    # The last cast to bfloat16, after several stages; and what backward adds to its kernels.
    several = merged and len(moves["forward"].cast)
    ends["forward"] += _cast_us(work.rows, machine) if several else 0.0
    ends["backward"] += _tail_us(work.rows, machine)
    return ends


def _cast_us(rows: int, machine: Machine) -> float:
    """Float32 results of all rows and heads to bfloat16."""
    return (4 + 2) * rows * NUM_HEADS * HEAD_DIM / machine.memory


def _tail_us(rows: int, machine: Machine) -> float:
    """``delta`` from ``out`` and ``dout``, and dQ to bfloat16."""
    return 4 * rows * NUM_HEADS * HEAD_DIM / machine.memory + _cast_us(rows, machine)


def _gather_us(ranks: int, rows: int, machine: Machine) -> float:
    """All-gather of keys and values, or its transpose, in bfloat16 over neighbouring ranks.

    Bytes enter a node once, over all its links together, and are passed on inside it.
    """
    if ranks == 1:
        return 0.0
    shard = rows * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    node = min(ranks, machine.node)
    return machine.move_us((ranks - 1) * shard, (ranks - node) * shard / node)


def _to_heads_us(rows: int, heads: int, size: int, machine: Machine) -> float:
    """All-to-all of ``rows [rows, heads, HEAD_DIM]`` in bfloat16 over neighbouring ranks."""
    each = rows * max(heads // size, 1) * HEAD_DIM * 2  # what one rank sends to one other
    node = min(size, machine.node)
    return machine.move_us((node - 1) * each, (size - node) * each) if size > 1 else 0.0


def _head_ring_us(strategy, work: Work, kernels: np.ndarray, machine: Machine, backward: bool):
    """All-to-all, rings, all-to-all; the all-to-alls hide behind nothing.

    The backward pass has kept the keys and values of all steps, so only gradients go round.
    """
    size, rows = strategy.heads, work.rows
    q_us = _to_heads_us(rows, NUM_HEADS, size, machine)
    kv_us = 2 * _to_heads_us(rows, NUM_KV_HEADS, size, machine)
    ring = _ring_backward_us if backward else _ring_forward_us
    return 2 * q_us + kv_us + ring(strategy, work, kernels, machine)


def _hops(strategy, work: Work, machine: Machine) -> tuple[np.ndarray, float]:
    """Microseconds of a hop to each group from the one before on the inner ring, and on the outer."""
    (_, outer), (_, inner), (_, heads) = strategy.axes
    shard = work.rows * heads * 2 * max(NUM_KV_HEADS // heads, 1) * HEAD_DIM * 2
    group = np.arange(outer * inner)
    before = group // inner * inner + (group - 1) % inner
    crosses = group * heads // machine.node != before * heads // machine.node
    hop = np.where(crosses, machine.move_us(0, shard), machine.move_us(shard, 0))
    return hop, machine.move_us(0, shard)


def _ring_forward_us(strategy, work: Work, kernels: np.ndarray, machine: Machine) -> float:
    """A group computes on one block while the next one arrives in a second buffer."""
    (_, outer), (_, inner), _ = strategy.axes
    hop, outer_hop = _hops(strategy, work, machine)
    group = np.arange(len(kernels))
    before = group // inner * inner + (group - 1) % inner
    outer_before = (group - inner) % len(group)
    heads = max(NUM_HEADS // strategy.heads, 1)
    merge_us = (4 + 4 + 2) * work.rows * strategy.heads * heads * HEAD_DIM / machine.memory
    end, began, round_began = np.zeros((3, len(group)))
    first = np.zeros(len(group))  # when the block that opens a round is there
    for step in range(outer * inner):
        if step % inner == 0:
            arrived, round_began = first, np.maximum(first, end)
            first = np.maximum(first[outer_before], round_began) + outer_hop
        began = np.maximum(arrived, end)
        busy = kernels[:, step]
        # The buffer for the next block is free once the block before this one is done with.
        arrived = np.maximum(arrived[before], end) + hop
        end = began + busy + merge_us * ((busy > 0) & (step > 0))
    return float(end.max()) + (_cast_us(work.rows, machine) if outer * inner > 1 else 0.0)


def _ring_backward_us(strategy, work: Work, kernels: np.ndarray, machine: Machine) -> float:
    """Sums of dK and dV follow their block, hidden by the kernels of the next step or round."""
    (_, outer), (_, inner), _ = strategy.axes
    hop, outer_hop = _hops(strategy, work, machine)
    group = np.arange(len(kernels))
    before = group // inner * inner + (group - 1) % inner
    outer_before = (group - inner) % len(group)
    heads = max(NUM_HEADS // strategy.heads, 1)
    merge_us = 3 * 4 * work.rows * strategy.heads * heads * HEAD_DIM / machine.memory
    end, home = np.zeros((2, len(group)))
    for outer_step in range(outer):
        passed = np.zeros(len(group))  # when the sums of the block are here
        for step in range(outer_step * inner, (outer_step + 1) * inner):
            busy = kernels[:, step]
            end = end + busy + merge_us * ((busy > 0) & (step > 0))
            passed = np.maximum(end, passed)
            if inner > 1:
                passed = passed[before] + hop
        home = np.maximum(home, passed)
        if outer > 1:
            home = home[outer_before] + outer_hop
    return float(np.maximum(home, end).max()) + _tail_us(work.rows, machine)
