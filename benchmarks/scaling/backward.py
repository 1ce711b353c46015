"""When the backward pass of our plans is done: as `parallel.stages` and `parallel.pipeline` order it."""

import numpy as np

from scaling.machine import Machine, Moves, Times, elements
from scaling.work import HEAD_DIM, NUM_KV_HEADS, Work


def backward_us(work: Work, times: Times, moves: Moves, machine: Machine) -> float:
    """Microseconds of the slowest rank.

    Remote stages come first, late queries as one of them, own keys last: they hide the last reduce.
    ``delta`` is made beside the first cast, and dQ cleared where that is of a stage. Kernels add to it.
    """
    remote = len(moves.cast) > 0
    delta_us = np.full(moves.cast.shape[1], 4 * elements(work.rows) / machine.memory)
    if remote and not work.backward_late_rows:
        delta_us += 4 * elements(work.rows) / machine.memory
    travels = times.travel_backward is not None
    link = moves.travel_out if travels else np.zeros_like(delta_us)
    stages = _in_one_step if moves.within is None else _in_two_steps
    busy, back = stages(times.backward.T, moves, delta_us, link)
    busy = busy + times.backward[:, 0]
    if travels:
        busy = np.maximum(busy, moves.travel_out) + times.travel_backward
        back = np.maximum(back, busy) + moves.travel_back
    # A last sum is one with the way to bfloat16: of dQ that travelled, and of dK and dV, of which few are.
    last_us = (4 * (1 + travels) + 2) * elements(work.rows) / machine.memory
    last_us += (4 * (1 + remote) + 2) * 2 * work.rows * NUM_KV_HEADS * HEAD_DIM / machine.memory
    return float(np.maximum(busy, back).max()) + last_us


def _in_one_step(kernels, moves: Moves, busy, link):
    """When all remote stages are computed, and when their gradients are back, ``[ranks]`` each.

    A cast runs beside the stage before, a reduce beside the stage after, both on one link.
    """
    stages, returned = len(moves.cast), link
    if stages:
        link = arrived = link + moves.cast[0]
    for stage in range(stages):
        begin = np.maximum(busy, arrived)
        if stage + 1 < stages:
            link = arrived = np.maximum(link, begin) + moves.cast[stage + 1]
        busy = begin + kernels[stage + 1]
        busy = np.maximum(busy, returned) if stage else busy  # one reduce in flight
        link = returned = np.maximum(link, busy) + moves.reduce[stage]
    return busy, returned


def _in_two_steps(kernels, moves: Moves, busy, link):
    """The same where rows cross beside one stage and move inside nodes beside the next, on a link each."""
    stages = len(moves.cast)
    near_cast, near_reduce = moves.within
    near = np.zeros_like(link)
    crossed = []
    for stage in range(min(stages, 2)):
        link = link + moves.cast[stage]
        crossed.append(link)
    left = back = np.zeros_like(link)  # when the latest reduces are done, inside nodes and across
    arrived = near
    for stage in range(stages):
        if stage == 0:
            near = arrived = np.maximum(busy, crossed[0]) + near_cast[0]
        begin = np.maximum(busy, arrived)
        if stage + 1 < stages:  # waits for what is to move inside nodes beside this stage
            begin = np.maximum(begin, crossed[stage + 1])
            near = arrived = np.maximum(near, begin) + near_cast[stage + 1]
        if stage + 2 < stages:
            link = np.maximum(link, begin) + moves.cast[stage + 2]
            crossed.append(link)
        busy = begin + kernels[stage + 1]
        if stage:
            busy = np.maximum(busy, np.maximum(left, back))
            link = back = np.maximum(link, busy) + moves.reduce[stage - 1]
        near = left = np.maximum(near, busy) + near_reduce[stage]
    if stages:  # own keys come next, and hide the way between nodes alone
        busy = np.maximum(busy, left)
        back = np.maximum(link, busy) + moves.reduce[-1]
    return busy, back
