"""When strategies with collectives of fixed shape are done: all-gathers, all-to-alls and rings."""

import numpy as np

from scaling.machine import Machine, cast_us, tail_us
from scaling.work import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Work


def gather_us(ranks: int, rows: int, machine: Machine) -> float:
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


def head_ring_us(strategy, work: Work, kernels: np.ndarray, machine: Machine, backward: bool):
    """All-to-all, rings, all-to-all; the all-to-alls hide behind nothing.

    The backward pass has kept the keys and values of all steps, so only gradients go round.
    """
    size, rows = strategy.heads, work.rows
    q_us = _to_heads_us(rows, NUM_HEADS, size, machine)
    kv_us = 2 * _to_heads_us(rows, NUM_KV_HEADS, size, machine)
    ring = _ring_backward_us if backward else _ring_forward_us
    return 2 * q_us + kv_us + ring(strategy, work, kernels, machine)


def _neighbours(outer: int, inner: int) -> tuple[np.ndarray, np.ndarray]:
    """The group that each group receives from, on the inner ring and on the outer."""
    group = np.arange(outer * inner)
    return group // inner * inner + (group - 1) % inner, (group - inner) % len(group)


def _hops(strategy, work: Work, machine: Machine) -> tuple[np.ndarray, float]:
    """Microseconds of a hop to each group from the one before on the inner ring, and on the outer."""
    (_, outer), (_, inner), (_, heads) = strategy.axes
    shard = work.rows * heads * 2 * max(NUM_KV_HEADS // heads, 1) * HEAD_DIM * 2
    group = np.arange(outer * inner)
    before, _ = _neighbours(outer, inner)
    crosses = group * heads // machine.node != before * heads // machine.node
    hop = np.where(crosses, machine.move_us(0, shard), machine.move_us(shard, 0))
    return hop, machine.move_us(0, shard)


def _ring_forward_us(strategy, work: Work, kernels: np.ndarray, machine: Machine) -> float:
    """A group computes on one block while the next one arrives in a second buffer."""
    (_, outer), (_, inner), _ = strategy.axes
    before, outer_before = _neighbours(outer, inner)
    hop, outer_hop = _hops(strategy, work, machine)
    heads = max(NUM_HEADS // strategy.heads, 1)
    merge_us = (4 + 4 + 2) * work.rows * strategy.heads * heads * HEAD_DIM / machine.memory
    end, began, round_began = np.zeros((3, len(before)))
    first = np.zeros(len(before))  # when the block that opens a round is there
    for step in range(outer * inner):
        if step % inner == 0:
            arrived, round_began = first, np.maximum(first, end)
            first = np.maximum(first[outer_before], round_began) + outer_hop
        began = np.maximum(arrived, end)
        busy = kernels[:, step]
        # The buffer for the next block is free once the block before this one is done with.
        arrived = np.maximum(arrived[before], end) + hop
        end = began + busy + merge_us * ((busy > 0) & (step > 0))
    return float(end.max()) + (cast_us(work.rows, machine) if outer * inner > 1 else 0.0)


def _ring_backward_us(strategy, work: Work, kernels: np.ndarray, machine: Machine) -> float:
    """Sums of dK and dV follow their block, hidden by the kernels of the next step or round."""
    (_, outer), (_, inner), _ = strategy.axes
    before, outer_before = _neighbours(outer, inner)
    hop, outer_hop = _hops(strategy, work, machine)
    heads = max(NUM_HEADS // strategy.heads, 1)
    merge_us = 3 * 4 * work.rows * strategy.heads * heads * HEAD_DIM / machine.memory
    end, home = np.zeros((2, len(before)))
    for outer_step in range(outer):
        passed = np.zeros(len(before))  # when the sums of the block are here
        for step in range(outer_step * inner, (outer_step + 1) * inner):
            busy = kernels[:, step]
            end = end + busy + merge_us * ((busy > 0) & (step > 0))
            passed = np.maximum(end, passed)
            if inner > 1:
                passed = passed[before] + hop
        home = np.maximum(home, passed)
        if outer > 1:
            home = home[outer_before] + outer_hop
    return float(np.maximum(home, end).max()) + tail_us(work.rows, machine, outer * inner > 1)
