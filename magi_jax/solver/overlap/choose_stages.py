"""How many remote stages: forward and backward each take the number that is predicted fastest."""

from typing import Any, NamedTuple

import numpy as np

from magi_jax.solver.cost import schedule, timeline
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.work.find_work import Work, traffic
from magi_jax.solver.work.remote import Remote
from magi_jax.solver.work.stages import Staged
from magi_jax.solver.work.two_level import is_near
from magi_jax.solver.work.two_level import traffic as two_level_traffic

MOST_STAGES = 4
# A way whose transfers take so many times the least is not looked at further.
LIKELY = 1.1

# Remote stages of a direction that are settled: how many, or whether each has rows of own nodes alone; None
# leaves them open.
Settled = int | tuple[bool, ...] | None
Counts = tuple[Settled, Settled]
# Stages of rows of own nodes, which need not cross, beside those of all other rows: the first are there while
# others cross, the last leave others time to cross on their way back.
NEAR, FAR = True, False
NEAR_STAGES = (
    (NEAR, FAR), (NEAR, NEAR, FAR), (NEAR, FAR, FAR), (NEAR, FAR, NEAR), (NEAR, FAR, FAR, NEAR),
)  # fmt: skip
# Where the first of these takes so many times the least, the others are not looked at.
CLOSE = 1.05


class Choice(NamedTuple):
    """Stages of both directions, and the times that are predicted for them together.

    Attributes:
        forward, backward: work in stages; one object when both have the same number.
        each_us: time of forward and of backward; forward with what brings results of several stages into the
            dtype of q.
        two_level: whether rows move in two steps.
    """

    forward: Staged
    backward: Staged
    each_us: tuple[float, float]
    two_level: bool

    @property
    def predicted_us(self) -> float:
        """Time of both directions."""
        return sum(self.each_us)


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


# Times closer than this are the same: engines round differently.
TIE = 1e-9


def choose_stages(
    work: Work,
    local_len: int,
    machine: Machine,
    counts: Counts = (None, None),
) -> Choice:
    """Predicts stages from their exact slices and takes the fastest, for each direction by itself.

    Tried are 1 to `MOST_STAGES` straight stages of equal size, then turned ones (`remote.split_stages`)
    in the best of these numbers, or in the largest where one was best; in two steps `NEAR_STAGES` too. Rows
    take the way, in one step or in two, whose transfers take less time; where they take nearly the same,
    all is tried for both.

    Args:
        work: what one layout asks for.
        local_len: rows of each rank.
        machine: what to predict for.
        counts: stages that are settled; 0 on one rank.

    Raises:
        ValueError: it is settled which stages are near, and rows take one step; or there are rows without a
            stage.
    """
    predictor = _predictor(work, local_len, machine)
    _, kinds, each_us = _fastest(predictor, machine, counts)
    cut = {kind: predictor.staged(kind) for kind in set(kinds)}
    convert_us = machine.cost_model.convert_us(local_len) if kinds[0].stages else 0.0
    each_us = each_us[0] + convert_us, each_us[1]
    return Choice(cut[kinds[0]], cut[kinds[1]], each_us, kinds[0].two_level)


def predict_us(work: Work, local_len: int, machine: Machine, counts: Counts) -> float:
    """`Choice.predicted_us` alone."""
    return _fastest(_predictor(work, local_len, machine), machine, counts)[0]


def _predictor(work: Work, local_len: int, machine: Machine) -> "NumpyTimes | CompiledTimes":
    compiles = work.engine == "compiled" and work.keys.layout is not None
    return (CompiledTimes if compiles else NumpyTimes)(work, local_len, machine)


def _fastest(
    predictor: "NumpyTimes | CompiledTimes", machine: Machine, counts: Counts
) -> tuple[float, list[Kind], tuple[float, float]]:
    """As `_choose`, by the faster way."""
    ways = machine.ways(predictor.work.layout.cp_size)
    if any(isinstance(count, tuple) for count in counts):
        if True not in ways:
            raise ValueError(f"stages of own nodes, {counts}, want rows to take two steps")
        ways = (True,)
    links_us = {way: _links_us(predictor.held_up(way), machine, way) for way in ways}
    likely_us = LIKELY * min(float(links_us[way].sum()) for way in ways)
    ways = tuple(way for way in ways if links_us[way].sum() <= likely_us)
    # Links work side by side, so that the busiest gives a time that no stages beat.
    least_us = {way: float(links_us[way].max(axis=0).sum()) for way in ways}
    found: dict[bool, tuple[float, list[Kind], tuple[float, float]]] = {}
    for way in sorted(ways, key=least_us.__getitem__):
        if all(least_us[way] < other[0] for other in found.values()):
            found[way] = _choose(predictor, links_us[way], machine, counts, way)
    best = min(found[way] for way in found)
    if False in found and found[False][0] <= best[0] * (1 + TIE):
        best = found[False]
    return best


def _choose(
    predictor: "NumpyTimes | CompiledTimes",
    links_us: np.ndarray,
    machine: Machine,
    counts: Counts,
    two_level: bool,
) -> tuple[float, list[Kind], tuple[float, float]]:
    """Predicted time of both directions for rows that move in two steps, or in one, their stages, and the
    time of each direction.
    """
    predicted: dict[Kind, tuple[float, float]] = {}
    kinds: list[Kind] = []
    each_us: list[float] = []
    for backward, settled in enumerate(counts):
        times_us: dict[Kind, float] = {}

        def predict(kind: Kind, backward=backward, times_us=times_us) -> None:
            if kind not in predicted:
                predicted[kind] = predictor.times_us(kind)
            times_us[kind] = predicted[kind][backward]

        # All that a second stage could hide is less than what launching it costs.
        launch_us = machine.cost_model.merge_us(0, bool(backward))
        vain = settled is None and links_us[:, backward].sum() <= launch_us
        if isinstance(settled, tuple):
            predict(Kind(len(settled), False, two_level, settled))
        else:
            most = 1 if vain else MOST_STAGES
            for count in range(1, most + 1) if settled is None else (settled,):
                predict(Kind(count, False, two_level))
            if not vain and settled not in (0, 1):
                best = _least(times_us).stages
                predict(Kind(MOST_STAGES if best == 1 else best, True, two_level))
            if settled is None and not vain and two_level and _has_both(predictor.work, machine):
                first, *others = (Kind(len(near), False, True, near) for near in NEAR_STAGES)
                predict(first)
                if times_us[first] <= CLOSE * min(times_us.values()):
                    for kind in others:
                        predict(kind)
        kinds.append(_least(times_us))
        each_us.append(times_us[kinds[-1]])
    return sum(each_us), kinds, (each_us[0], each_us[1])


def _has_both(work: Work, machine: Machine) -> bool:
    """Whether rows come from own nodes and from others."""
    per_node = machine.node_of(work.layout.cp_size)
    near = is_near(work.far, per_node)
    return bool(near.any() and not near.all())


def _least(times_us: dict[Kind, float]) -> Kind:
    """The first of the fastest."""
    limit = min(times_us.values()) * (1 + TIE)
    return next(kind for kind, time_us in times_us.items() if time_us <= limit)


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


def _links_us(rows: tuple[np.ndarray, np.ndarray], machine: Machine, two_level: bool) -> np.ndarray:
    """How long the links of the busiest rank are busy, ``[steps, 2]``: forward and backward.

    Args:
        rows: that hold ranks up, inside nodes and across.
        machine: what to predict for.
        two_level: whether rows take two steps, each over links of its own.
    """
    model = machine.cost_model
    near, far = rows
    none = np.zeros_like(near)
    busy_us = []
    for step in ((none, far), (near, none)) if two_level else ((near, far),):
        cast_us = model.cast_us(*step)
        both_us = cast_us + model.reduce_us(*step)
        busy_us.append((cast_us.max(initial=0.0), both_us.max(initial=0.0)))
    return np.array(busy_us)
