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
    cp_size, model = work.layout.cp_size, machine.cost_model
    per_node = machine.ranks_per_node or cp_size
    whole = traffic(work.far, 1, cp_size)
    staged: dict[int, Staged] = {}
    chosen: list[Staged] = []
    total_us = 0.0
    for backward, settled in zip((False, True), counts, strict=True):
        options = range(1, MOST_STAGES + 1) if settled is None else (settled,)
        if settled is None and _is_vain(whole, local_len, per_node, model, backward):
            options = (1,)
        for count in options:
            if count not in staged:
                staged[count] = work.staged(count)
        moved = None
        if work.travel is not None:
            rows = traffic(work.travel.moved, 1, cp_size)[0]
            moved = timeline.travel_work(work.travel.away, rows, per_node, model, backward)
        times_us = {
            count: timeline.simulate(
                timeline.direction_work(
                    staged[count].slices, traffic(staged[count].remote, count, cp_size), local_len,
                    per_node, model, backward, moved,
                )
            ).predicted_us
            for count in options
        }  # fmt: skip
        best = min(options, key=times_us.__getitem__)
        chosen.append(staged[best])
        total_us += times_us[best]
    forward, backward_too = chosen
    return Choice(forward, backward_too, total_us)


def _is_vain(
    whole: np.ndarray, local_len: int, per_node: int, model: CostModel, backward: bool
) -> bool:
    """Whether one remote stage is best whatever the kernels take: all that a second could hide is less
    than what merging it costs.
    """
    rows = timeline.link_rows(whole, per_node)
    hidden_us = model.cast_us(*rows).max(initial=0.0)
    if backward:
        hidden_us += model.reduce_us(*rows).max(initial=0.0)
    return bool(hidden_us <= model.merge_us(local_len))
