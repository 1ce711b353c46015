"""Lays the work of one direction out in time.

A rank has one compute stream and one communication stream. Forward, own keys come first: the cast of a stage
is issued when the attention of the stage before it starts. Travelling queries leave before everything and
are computed after own keys. Backward, own keys come last, and hide the way back of the last stage's dK and
dV; nothing hides the first cast, unless some queries see own keys before it. The dK and dV of a stage leave
when its attention is done.

Where rows move in two steps (`solver/work/two_level.py`), a rank has a stream for each: rows cross between
nodes two stages ahead, and move inside the node one stage ahead, both beside attention. Only the second
step of a first stage that takes both comes between two attentions, or before all of them, since nothing is
left to hide it behind; and in the backward pass the first step of the way of a last stage's gradients.
Stages of rows of own nodes take the second step alone: one that is first is issued at once, beside the rows
of the first stage that cross.
"""

import numpy as np

from magi_jax.solver.cost.timeline import DirectionWork, Timeline


class _Link:
    """What one stream of transfers of each rank does, one after the other."""

    def __init__(self, cp_size: int):
        self.free = np.zeros(cp_size)

    def move(self, start: np.ndarray | float, length_us: np.ndarray) -> np.ndarray:
        """Begin and end ``[cp, 2]`` of a transfer that may begin at ``start``."""
        start = np.maximum(self.free, start)
        self.free = start + length_us
        return np.stack([start, self.free], axis=1)


def simulate(work: DirectionWork) -> Timeline:
    """Lays the stages of one direction out in time."""
    if work.within_us is not None:
        return _in_two_steps(work)
    return _backward_in_one_step(work) if work.own_keys_last else _forward_in_one_step(work)


def _nothing(work: DirectionWork) -> Timeline:
    """All of length zero."""
    num_stages, cp_size = work.cast_us.shape
    sizes = ((num_stages + 1,), (num_stages,), (num_stages,), (3,), (2, num_stages))
    return Timeline(*(np.zeros((*size, cp_size, 2)) for size in sizes))


def _forward_in_one_step(work: DirectionWork) -> Timeline:
    found, link = _nothing(work), _Link(work.cast_us.shape[1])
    num_stages = len(work.cast_us)
    arrived = kernel_free = np.zeros_like(link.free)
    if work.travel is not None:
        found.travel[0] = link.move(0.0, work.travel.out_us)
    for stage in range(num_stages + 1):
        begin = np.maximum(kernel_free, arrived)
        kernel_free = begin + work.kernel_us[stage] + (_merge_us(work, stage) if stage else 0.0)
        found.compute[stage] = np.stack([begin, kernel_free], axis=1)
        if stage < num_stages:  # issued first, so that it is ahead of this stage's reduce
            found.cast[stage] = link.move(begin, work.cast_us[stage])
            arrived = link.free
        if stage == 0:
            kernel_free = _travel(work, found, link, kernel_free)
        if stage > 0:
            found.reduce[stage - 1] = link.move(kernel_free, work.reduce_us[stage - 1])
    return _merged(work, kernel_free, found, num_stages)


def _backward_in_one_step(work: DirectionWork) -> Timeline:
    found, link = _nothing(work), _Link(work.cast_us.shape[1])
    num_stages = len(work.cast_us)
    kernel_free = np.zeros_like(link.free)
    if work.first_us is not None:
        kernel_free = kernel_free + work.first_us
    if num_stages:
        found.cast[0] = link.move(0.0, work.cast_us[0])
    if work.travel is not None:
        found.travel[0] = link.move(0.0, work.travel.out_us)
    for stage in range(1, num_stages + 1):
        begin = np.maximum(kernel_free, found.cast[stage - 1, :, 1])
        if stage < num_stages:
            found.cast[stage] = link.move(begin, work.cast_us[stage])
        kernel_free = begin + work.kernel_us[stage] + _merge_us(work, stage)
        found.compute[stage] = np.stack([begin, kernel_free], axis=1)
        found.reduce[stage - 1] = link.move(kernel_free, work.reduce_us[stage - 1])
    kernel_free = _local(work, found, kernel_free)
    kernel_free = _travel(work, found, link, kernel_free)
    return _merged(work, kernel_free, found, 0)


def _in_two_steps(work: DirectionWork) -> Timeline:
    found = _nothing(work)
    num_stages, cp_size = work.cast_us.shape
    far, near = _Link(cp_size), _Link(cp_size)
    is_near = work.near or (False,) * num_stages
    to_cross = [stage for stage in range(num_stages) if not is_near[stage]]
    kernel_free = _begin_two_steps(work, found, far, near, to_cross)
    assert work.within_us is not None, "there is no step inside nodes"
    left = np.zeros(cp_size)  # when the latest gradients have moved inside nodes
    for stage in range(1, num_stages + 1):
        begin = np.maximum(kernel_free, found.within[0, stage - 1, :, 1])
        if stage < num_stages:
            # Attention waits for the start of the step that is to run beside it.
            if not is_near[stage]:
                begin = np.maximum(begin, found.cast[stage, :, 1])
            found.within[0, stage] = near.move(begin, work.within_us[0, stage])
            if not is_near[stage]:
                _cross(work, found, far, begin, to_cross)
        kernel_free = begin + work.kernel_us[stage] + _merge_us(work, stage)
        found.compute[stage] = np.stack([begin, kernel_free], axis=1)
        if not work.own_keys_last:
            continue
        if stage > 1:  # what ran beside it is taken before what it gave is sent
            kernel_free = np.maximum(kernel_free, left)
            if not is_near[stage - 2]:
                found.reduce[stage - 2] = far.move(kernel_free, work.reduce_us[stage - 2])
        found.within[1, stage - 1] = near.move(kernel_free, work.within_us[1, stage - 1])
        left = near.free
    if not work.own_keys_last:
        return _merged(work, kernel_free, found, num_stages)
    if num_stages and not is_near[-1]:
        kernel_free = np.maximum(kernel_free, left)
        found.reduce[-1] = far.move(kernel_free, work.reduce_us[-1])
    kernel_free = _local(work, found, kernel_free)
    return _merged(work, _travel(work, found, far, kernel_free), found, 0)


def _begin_two_steps(
    work: DirectionWork, found: Timeline, far: _Link, near: _Link, to_cross: list[int]
) -> np.ndarray:
    """All that comes before the attention of the first remote stage; when kernels are free."""
    assert work.within_us is not None, "there is no step inside nodes"
    num_stages = len(work.cast_us)
    begins_near = num_stages > 0 and 0 not in to_cross
    kernel_free = np.zeros_like(far.free)
    if work.travel is not None and not work.own_keys_last:
        found.travel[0] = far.move(0.0, work.travel.out_us)
    if begins_near:
        found.within[0, 0] = near.move(0.0, work.within_us[0, 0])
    for _ in range(1 if begins_near else 2):
        _cross(work, found, far, 0.0, to_cross)
    if work.travel is not None and work.own_keys_last:
        found.travel[0] = far.move(0.0, work.travel.out_us)
    if not work.own_keys_last:
        kernel_free = _local(work, found, kernel_free)
    if num_stages and not begins_near:
        start = np.maximum(kernel_free, found.cast[0, :, 1])
        found.within[0, 0] = near.move(start, work.within_us[0, 0])
    return kernel_free if work.own_keys_last else _travel(work, found, far, kernel_free)


def _cross(
    work: DirectionWork, found: Timeline, far: _Link, start: np.ndarray | float, to_cross: list[int]
) -> None:
    """Sends the rows of the next of the stages ``to_cross`` between nodes, if there is one."""
    if to_cross:
        stage = to_cross.pop(0)
        found.cast[stage] = far.move(start, work.cast_us[stage])


def _merge_us(work: DirectionWork, stage: int) -> np.ndarray:
    """What merging a remote stage, counted from 1, takes on each rank."""
    return np.broadcast_to(work.merge_us, work.cast_us.shape)[stage - 1]


def _local(work: DirectionWork, found: Timeline, begin: np.ndarray) -> np.ndarray:
    """Attention over own keys; when it ends."""
    found.compute[0] = np.stack([begin, begin + work.kernel_us[0]], axis=1)
    return found.compute[0, :, 1].copy()


def _travel(
    work: DirectionWork, found: Timeline, link: _Link, kernel_free: np.ndarray
) -> np.ndarray:
    """Attention of the queries that came, and the way back of its results; when it ends."""
    if work.travel is None:
        return kernel_free
    begin = np.maximum(kernel_free, found.travel[0, :, 1])
    kernel_free = begin + work.travel.kernel_us
    found.travel[1] = np.stack([begin, kernel_free], axis=1)
    found.travel[2] = link.move(kernel_free, work.travel.return_us)
    return kernel_free


def _merged(
    work: DirectionWork, kernel_free: np.ndarray, found: Timeline, last_stage: int
) -> Timeline:
    """The same, with what travelling queries bring merged when it is there and all stages are done."""
    if work.travel is not None:
        done = np.maximum(kernel_free, found.travel[2, :, 1]) + work.travel.merge_us
        found.compute[last_stage, :, 1] = done
    return found
