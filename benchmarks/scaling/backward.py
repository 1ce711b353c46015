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
    kernels = times.backward.T
    if work.alike:  # keys are there, and stages are walked from the last to the first
        kernels, moves = _reversed(kernels, moves)
    busy, back = stages(kernels, moves, delta_us, link)
    busy = busy + times.backward[:, 0]
    if travels:
        busy = np.maximum(busy, moves.travel_out) + times.travel_backward
        back = np.maximum(back, busy) + moves.travel_back
    last_us = 0.0
    if remote or travels:  # a call that is alone writes bfloat16
        # A last sum is one with the way to bfloat16: of dQ that travelled, and of few dK and dV.
        last_us += (4 * (1 + travels) + 2) * elements(work.rows) / machine.memory
        last_us += (4 * (1 + remote) + 2) * 2 * work.rows * NUM_KV_HEADS * HEAD_DIM / machine.memory
    return float(np.maximum(busy, back).max()) + last_us


def _reversed(kernels, moves: Moves):
    """Kernels and transfers with remote stages in the opposite order."""
    within = None if moves.within is None else moves.within[:, ::-1]
    moves = moves._replace(
        cast=moves.cast[::-1], reduce=moves.reduce[::-1], within=within, near=moves.near[::-1]
    )
    return np.concatenate([kernels[:1], kernels[:0:-1]]), moves


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


class _Crossings:
    """Casts between nodes, of the stages that have any, one after the other."""

    def __init__(self, moves: Moves, link):
        self.moves, self.link = moves, link
        self.is_near = moves.near or (False,) * len(moves.cast)
        self.waiting = [stage for stage, near in enumerate(self.is_near) if not near]
        self.done: dict = {}

    def start(self, begin) -> None:
        """The next of them, not before ``begin``."""
        if self.waiting:
            stage = self.waiting.pop(0)
            self.link = self.done[stage] = np.maximum(self.link, begin) + self.moves.cast[stage]


def _in_two_steps(kernels, moves: Moves, busy, link):
    """The same where rows cross beside one stage and move inside nodes beside the next, on a link each."""
    stages = len(moves.cast)
    if not stages:
        return busy, np.zeros_like(link)
    near_cast, near_reduce = moves.within
    crossings = _Crossings(moves, link)
    is_near = crossings.is_near
    for _ in range(1 if is_near[0] else 2):
        crossings.start(0.0)
    left = back = np.zeros_like(link)  # when the latest reduces are done, inside nodes and across
    near = arrived = near_cast[0] + (0.0 if is_near[0] else np.maximum(busy, crossings.done[0]))
    for stage in range(stages):
        begin = np.maximum(busy, arrived)
        if stage + 1 < stages:  # waits for what is to move inside nodes beside this stage
            begin = np.maximum(begin, crossings.done.get(stage + 1, 0.0))
            near = arrived = np.maximum(near, begin) + near_cast[stage + 1]
            if not is_near[stage + 1]:
                crossings.start(begin)
        busy = begin + kernels[stage + 1]
        if stage:
            busy = np.maximum(busy, left)
            if not is_near[stage - 1]:
                crossings.link = back = np.maximum(crossings.link, busy) + moves.reduce[stage - 1]
        near = left = np.maximum(near, busy) + near_reduce[stage]
    if not is_near[-1]:  # own keys come next, and hide the way between nodes alone
        busy = np.maximum(busy, left)
        back = np.maximum(crossings.link, busy) + moves.reduce[-1]
    return busy, np.maximum(left, back)
