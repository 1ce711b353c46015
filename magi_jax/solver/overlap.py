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
    """Predicts stages from their exact slices and takes the fastest, for each direction by itself.

    Tried are 1 to `MOST_STAGES` straight stages of equal size, then turned ones (`remote.split_stages`)
    in the best of these numbers, or in the largest where one was best.

    Args:
        work: what one layout asks for.
        local_len: rows of each rank.
        machine: what to predict for.
        counts: numbers of stages that are settled; 0 on one rank.
    """
    options: dict[tuple[int, bool], _Option] = {}
    chosen: list[Staged] = []
    total_us = 0.0
    for backward, settled in zip((False, True), counts, strict=True):
        travel = _travel_work(work, machine, backward)
        times_us: dict[tuple[int, bool], float] = {}

        def predict(count: int, turned: bool, backward=backward, travel=travel, times_us=times_us):
            kind = (count, turned)
            if kind not in options:
                options[kind] = _Option.make(work, *kind, machine)
            times_us[kind] = options[kind].predict(local_len, machine, backward, travel)

        vain = settled is None and _is_vain(work, local_len, machine, backward)
        for count in range(1, 2 if vain else MOST_STAGES + 1) if settled is None else (settled,):
            predict(count, turned=False)
        best, _ = min(times_us, key=times_us.__getitem__)
        if not vain and settled not in (0, 1):
            predict(MOST_STAGES if best == 1 else best, turned=True)
        kind = min(times_us, key=times_us.__getitem__)
        chosen.append(options[kind].staged)
        total_us += times_us[kind]
    forward, backward_too = chosen
    return Choice(forward, backward_too, total_us)


class _Option(NamedTuple):
    """One way to cut stages, with what both directions' times depend on."""

    staged: Staged
    rows: tuple[np.ndarray, np.ndarray]
    shapes: timeline.Shapes

    @classmethod
    def make(cls, work: Work, count: int, turned: bool, machine: Machine) -> "_Option":
        staged, cp_size = work.staged(count, turned), work.layout.cp_size
        moved = traffic(staged.remote, count, cp_size)
        rows = timeline.link_rows(moved, machine.node_of(cp_size))
        model = machine.cost_model
        return cls(staged, rows, timeline.shapes_of(staged.slices, cp_size, model, work.engine))

    def predict(
        self,
        local_len: int,
        machine: Machine,
        backward: bool,
        travel: timeline.TravelWork | None,
    ) -> float:
        work = timeline.direction_work(
            self.shapes, self.rows, local_len, machine.cost_model, backward, travel
        )
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
