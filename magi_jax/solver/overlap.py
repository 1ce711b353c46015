"""How many remote stages: forward and backward each take the number that is predicted fastest."""

from typing import NamedTuple

import numpy as np

from magi_jax.solver import timeline
from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.stages import Staged
from magi_jax.solver.work import Work, traffic

MOST_STAGES = 4

# Numbers of remote stages of the forward and the backward pass that are settled; None leaves one open.
Counts = tuple[int | None, int | None]


class Machine(NamedTuple):
    """What times are predicted for: ranks of a node (None: all), and rates."""

    ranks_per_node: int | None = None
    cost_model: CostModel = CostModel()

    def node_of(self, cp_size: int) -> int:
        """Ranks of a node."""
        return min(self.ranks_per_node or cp_size, cp_size)


class Choice(NamedTuple):
    """Stages of both directions, and the times that are predicted for them together.

    Attributes:
        forward, backward: work in stages; one object when both have the same number.
        predicted_us: time of forward and backward.
    """

    forward: Staged
    backward: Staged
    predicted_us: float


def choose_stages(
    work: Work,
    local_len: int,
    machine: Machine,
    counts: Counts = (None, None),
) -> Choice:
    """Predicts 1 to `MOST_STAGES` stages of equal size from their exact slices and takes the fastest.

    Args:
        work: what one layout asks for.
        local_len: rows of each rank.
        machine: what to predict for.
        counts: numbers of stages that are settled; 0 on one rank.
    """
    chosen: list[_Option] = []
    options: dict[int, _Option] = {}
    total_us = 0.0
    for backward, settled in zip((False, True), counts, strict=True):
        tried = range(1, MOST_STAGES + 1) if settled is None else (settled,)
        if settled is None and _is_vain(work, local_len, machine, backward):
            tried = (1,)
        for count in tried:
            if count not in options:
                options[count] = _Option.make(work, count, machine)
        travel = _travel_work(work, machine, backward)
        times_us = {n: options[n].predict(local_len, machine, backward, travel) for n in tried}
        best = min(tried, key=times_us.__getitem__)
        chosen.append(options[best])
        total_us += times_us[best]
    forward, backward_too = chosen
    return Choice(forward.staged, backward_too.staged, total_us)


class _Option(NamedTuple):
    """One number of stages, with what both directions' times depend on."""

    staged: Staged
    traffic: np.ndarray
    shapes: timeline.Shapes

    @classmethod
    def make(cls, work: Work, count: int, machine: Machine) -> "_Option":
        staged, cp_size = work.staged(count), work.layout.cp_size
        rows = traffic(staged.remote, count, cp_size)
        return cls(staged, rows, timeline.shapes_of(staged.slices, cp_size, machine.cost_model))

    def predict(
        self,
        local_len: int,
        machine: Machine,
        backward: bool,
        travel: timeline.TravelWork | None,
    ) -> float:
        sizes = local_len, machine.node_of(self.shapes.cp_size), machine.cost_model
        work = timeline.direction_work(self.shapes, self.traffic, *sizes, backward, travel)
        return timeline.simulate(work).predicted_us


def _travel_work(work: Work, machine: Machine, backward: bool) -> timeline.TravelWork | None:
    if work.travel is None:
        return None
    cp_size = work.layout.cp_size
    rows = traffic(work.travel.moved, 1, cp_size)[0]
    sizes = machine.node_of(cp_size), machine.cost_model
    return timeline.travel_work(work.travel.away, rows, *sizes, backward)


def _is_vain(work: Work, local_len: int, machine: Machine, backward: bool) -> bool:
    """Whether one remote stage is best whatever the kernels take: all that a second could hide is less
    than what merging it costs.
    """
    cp_size, model = work.layout.cp_size, machine.cost_model
    rows = timeline.link_rows(traffic(work.far, 1, cp_size), machine.node_of(cp_size))
    hidden_us = model.cast_us(*rows).max(initial=0.0)
    if backward:
        hidden_us += model.reduce_us(*rows).max(initial=0.0)
    return bool(hidden_us <= model.merge_us(local_len))
