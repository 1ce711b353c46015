"""How long the stages of some work should take, by how they are cut: in NumPy, or in the compiled planner."""

from typing import Any, NamedTuple

import numpy as np

from magi_jax.solver.cost import schedule, timeline
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.work.find_work import Work, traffic
from magi_jax.solver.work.remote import Remote
from magi_jax.solver.work.stages import Staged
from magi_jax.solver.work.two_level import traffic as two_level_traffic


class Kind(NamedTuple):
    """A way to cut stages.

    Attributes:
        stages: how many.
        turned: whether each rank, or node, begins at another place; see `remote.split_stages`.
        two_level: whether rows take two steps.
        near: whether each has rows of own nodes alone; empty where stages have rows of all.
    """

    stages: int
    turned: bool
    two_level: bool
    near: tuple[bool, ...] = ()


def times_of(work: Work, local_len: int, machine: Machine) -> "NumpyTimes | CompiledTimes":
    """What predicts the times of stages of some work by the fastest means at hand."""
    compiles = work.engine == "compiled" and work.keys.layout is not None
    return (CompiledTimes if compiles else NumpyTimes)(work, local_len, machine)


class NumpyTimes:
    """Predicts the times of stages of some work, in NumPy.

    Args:
        work: what one layout asks for.
        local_len: rows of each rank.
        machine: what to predict for.
    """

    def __init__(self, work: Work, local_len: int, machine: Machine):
        self.work, self.local_len, self.machine = work, local_len, machine

    def held_up(self, two_level: bool) -> tuple[np.ndarray, np.ndarray]:
        """`timeline.link_rows` of all rows in one stage, ``[cp]`` each."""
        near, far = _link_rows(self.work.far, 1, self.work.layout.cp_size, self.machine, two_level)
        return near[0], far[0]

    def staged(self, kind: Kind) -> Staged:
        """The work in stages."""
        return _staged(self.work, self.machine, kind)

    def times_us(self, kind: Kind) -> tuple[float, float]:
        """Time of each direction in stages."""
        work, machine, cp_size = self.work, self.machine, self.work.layout.cp_size
        staged, two_level = self.staged(kind), kind.two_level
        rows = _link_rows(staged.remote, kind.stages, cp_size, machine, two_level)
        shapes = timeline.shapes_of(staged.slices, cp_size, machine.cost_model, work.engine)
        forward, backward = (
            schedule.simulate(
                timeline.direction_work(
                    shapes, rows, True, machine.cost_model, way,
                    _travel_work(work, self.local_len, machine, way, two_level), two_level, kind.near,
                )
            ).predicted_us
            for way in (False, True)
        )  # fmt: skip
        return forward, backward


class CompiledTimes:
    """The same in the compiled planner, for work whose keys are not on all ranks."""

    def __init__(self, work: Work, local_len: int, machine: Machine):
        self.work, self.local_len, self.machine = work, local_len, machine
        self.cutter = work.cutter(machine.node_of(work.layout.cp_size))
        model = machine.cost_model
        self.rates = tuple(model.rates(backward) for backward in (False, True))
        self.home = self.cutter.home_times(work.home_slices(), self.rates)
        self.travel: dict[bool, tuple[np.ndarray, np.ndarray] | None] = {}

    def held_up(self, two_level: bool) -> tuple[np.ndarray, np.ndarray]:
        """As in `NumpyTimes`."""
        near, far = self.cutter.held_up(two_level)
        return near, far

    def staged(self, kind: Kind) -> Staged:
        """As in `NumpyTimes`."""
        return _staged(self.work, self.machine, kind, self.cutter)

    def times_us(self, kind: Kind) -> tuple[float, float]:
        """As in `NumpyTimes`."""
        if kind.two_level not in self.travel:
            self.travel[kind.two_level] = self._travel_times(kind.two_level)
        travel = self.travel[kind.two_level]
        return self.cutter.predict(*kind, self.home, self.rates, travel)

    def _travel_times(self, two_level: bool) -> tuple[np.ndarray, np.ndarray] | None:
        """Times of travelling queries ``[4, cp]`` in both directions, as in `timeline.TravelWork`."""
        sizes = self.work, self.local_len, self.machine
        forward = _travel_work(*sizes, False, two_level)
        backward = _travel_work(*sizes, True, two_level)
        if forward is None or backward is None:
            return None
        return np.stack(np.broadcast_arrays(*forward)), np.stack(np.broadcast_arrays(*backward))


def _staged(work: Work, machine: Machine, kind: Kind, cutter: Any = None) -> Staged:
    per_node = machine.node_of(work.layout.cp_size) if kind.two_level else None
    return work.staged(kind.stages, kind.turned, per_node, cutter, kind.near)


def all_link_rows(work: Work, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """`timeline.link_rows` of all rows of some work in one step, ``[cp]`` each."""
    near, far = _link_rows(work.far, 1, work.layout.cp_size, machine, two_level=False)
    return near[0], far[0]


def _link_rows(
    remote: Remote, num_stages: int, cp_size: int, machine: Machine, two_level: bool
) -> tuple[np.ndarray, np.ndarray]:
    """`timeline.link_rows` of each stage, ``[S, cp]``, of rows that take one step or two."""
    per_node = machine.node_of(cp_size)
    if not two_level:
        return timeline.link_rows(traffic(remote, num_stages, cp_size), per_node)
    across, within = two_level_traffic(remote, num_stages, cp_size, per_node)
    return timeline.link_rows(across + within, per_node)


def _travel_work(
    work: Work, local_len: int, machine: Machine, backward: bool, two_level: bool
) -> timeline.TravelWork | None:
    if work.travel is None:
        return None
    rows = _link_rows(work.travel.moved, 1, work.layout.cp_size, machine, two_level)
    near, far = (each[0] for each in rows)
    return timeline.travel_work(
        work.travel.away, (near, far), local_len, machine.cost_model, backward, two_level
    )
