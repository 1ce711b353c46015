"""How many remote stages: forward and backward each take the number that is predicted fastest."""

from typing import NamedTuple

import numpy as np

from magi_jax.solver import timeline
from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.remote import Remote
from magi_jax.solver.stages import Staged
from magi_jax.solver.two_level import traffic as two_level_traffic
from magi_jax.solver.work import Work, traffic

MOST_STAGES = 4
# A way whose transfers take so many times the least is not looked at further.
LIKELY = 1.1

# Numbers of remote stages of the forward and the backward pass that are settled; None leaves one open.
Counts = tuple[int | None, int | None]


class Machine(NamedTuple):
    """What times are predicted for.

    Attributes:
        ranks_per_node: ranks that share a fast link; None takes all for one node.
        cost_model: rates.
        two_level: whether rows move in two steps, across nodes and then inside (`solver/two_level.py`):
            True, False, or "auto" for what is predicted faster.
    """

    ranks_per_node: int | None = None
    cost_model: CostModel = CostModel()
    two_level: bool | str = "auto"

    def node_of(self, cp_size: int) -> int:
        """Ranks of a node."""
        return min(self.ranks_per_node or cp_size, cp_size)

    def ways(self, cp_size: int) -> tuple[bool, ...]:
        """Ways that rows may take: in one step (False), in two (True), or either.

        Raises:
            ValueError: two steps are asked for, and the ranks are not whole nodes.
        """
        per_node = self.node_of(cp_size)
        if per_node == cp_size or self.two_level is False:
            return (False,)
        whole = cp_size % per_node == 0
        if self.two_level is True:
            if not whole:
                raise ValueError(
                    f"two_level=True wants whole nodes, {cp_size} ranks are not whole nodes of {per_node}"
                )
            return (True,)
        return (False, True) if whole and per_node > 1 else (False,)


class Choice(NamedTuple):
    """Stages of both directions, and the times that are predicted for them together.

    Attributes:
        forward, backward: work in stages; one object when both have the same number.
        predicted_us: time of forward and backward.
        two_level: whether rows move in two steps.
    """

    forward: Staged
    backward: Staged
    predicted_us: float
    two_level: bool


def choose_stages(
    work: Work,
    local_len: int,
    machine: Machine,
    counts: Counts = (None, None),
) -> Choice:
    """Predicts stages from their exact slices and takes the fastest, for each direction by itself.

    Tried are 1 to `MOST_STAGES` straight stages of equal size, then turned ones (`remote.split_stages`)
    in the best of these numbers, or in the largest where one was best. Rows take the way, in one step or in
    two, whose transfers take less time; where they take nearly the same, all is tried for both.

    Args:
        work: what one layout asks for.
        local_len: rows of each rank.
        machine: what to predict for.
        counts: numbers of stages that are settled; 0 on one rank.
    """
    ways = machine.ways(work.layout.cp_size)
    moved_us = [_moved_us(work, machine, way) for way in ways]
    least_us = min(map(sum, moved_us))
    choices = (
        _choose(work, local_len, machine, counts, way, each_us)
        for way, each_us in zip(ways, moved_us, strict=True)
        if sum(each_us) <= LIKELY * least_us
    )
    return min(choices, key=lambda choice: choice.predicted_us)


def _choose(
    work: Work,
    local_len: int,
    machine: Machine,
    counts: Counts,
    two_level: bool,
    moved_us: tuple[float, float],
) -> Choice:
    """`choose_stages` for rows that move in two steps, or in one, and `_moved_us` then."""
    options: dict[tuple[int, bool], _Option] = {}
    chosen: list[Staged] = []
    total_us = 0.0
    for backward, settled in zip((False, True), counts, strict=True):
        travel = _travel_work(work, machine, backward, two_level)
        times_us: dict[tuple[int, bool], float] = {}

        def predict(count: int, turned: bool, backward=backward, travel=travel, times_us=times_us):
            kind = (count, turned)
            if kind not in options:
                options[kind] = _Option(work, *kind, machine, two_level)
            times_us[kind] = options[kind].predict(local_len, backward, travel)

        # All that a second stage could hide may be less than what merging it costs.
        vain = settled is None and moved_us[backward] <= machine.cost_model.merge_us(local_len)
        for count in range(1, 2 if vain else MOST_STAGES + 1) if settled is None else (settled,):
            predict(count, turned=False)
        best, _ = min(times_us, key=times_us.__getitem__)
        if not vain and settled not in (0, 1):
            predict(MOST_STAGES if best == 1 else best, turned=True)
        kind = min(times_us, key=times_us.__getitem__)
        chosen.append(options[kind].staged)
        total_us += times_us[kind]
    return Choice(chosen[0], chosen[1], total_us, two_level)


class _Option:
    """One way to cut stages, with what the times of both directions depend on."""

    def __init__(self, work: Work, count: int, turned: bool, machine: Machine, two_level: bool):
        cp_size, self.model, self.two_level = work.layout.cp_size, machine.cost_model, two_level
        self.staged = work.staged(count, turned, machine.node_of(cp_size) if two_level else None)
        self.rows = _link_rows(self.staged.remote, count, cp_size, machine, two_level)
        self.shapes = timeline.shapes_of(self.staged.slices, cp_size, self.model, work.engine)

    def predict(self, local_len: int, backward: bool, travel: timeline.TravelWork | None) -> float:
        sizes = local_len, self.model, backward
        work = timeline.direction_work(self.shapes, self.rows, *sizes, travel, self.two_level)
        return timeline.simulate(work).predicted_us


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
    work: Work, machine: Machine, backward: bool, two_level: bool
) -> timeline.TravelWork | None:
    if work.travel is None:
        return None
    rows = _link_rows(work.travel.moved, 1, work.layout.cp_size, machine, two_level)
    near, far = (each[0] for each in rows)
    return timeline.travel_work(
        work.travel.away, (near, far), machine.cost_model, backward, two_level
    )


def _moved_us(work: Work, machine: Machine, two_level: bool) -> tuple[float, float]:
    """Time of all transfers in one stage, forward and backward, with nothing hidden and travelling queries
    left out.
    """
    model = machine.cost_model
    near, far = _link_rows(work.far, 1, work.layout.cp_size, machine, two_level)
    none = np.zeros_like(near)
    steps = ((none, far), (near, none)) if two_level else ((near, far),)
    cast_us = sum(float(model.cast_us(*rows).max(initial=0.0)) for rows in steps)
    reduce_us = sum(float(model.reduce_us(*rows).max(initial=0.0)) for rows in steps)
    return cast_us, cast_us + reduce_us
