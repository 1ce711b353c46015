"""How many remote stages: forward and backward each take the number that is predicted fastest."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.overlap.stage_times import CompiledTimes, Kind, NumpyTimes, times_of
from magi_jax.solver.work.find_work import Work
from magi_jax.solver.work.stages import Staged
from magi_jax.solver.work.two_level import is_near

MOST_STAGES = 4
# A way whose transfers take so many times the least is not looked at further.
LIKELY = 1.1

# Remote stages of a direction that are settled: how many, or whether each has rows of own nodes alone; None
# leaves them open.
Settled = int | tuple[bool, ...] | None
Counts = tuple[Settled, Settled]
# Orders of stages of rows of own nodes, which need not cross, and of those of all other rows, by direction:
# the first are there while others cross, the last leave others time to cross on their way back.
NEAR, FAR = True, False
FORWARD_ORDERS = ((NEAR, FAR), (NEAR, NEAR, FAR), (NEAR, FAR, FAR))
BACKWARD_ORDERS = ((FAR, NEAR), (NEAR, FAR, FAR), (NEAR, FAR, FAR, NEAR))
# Looked at backward where three stages or more are best by then: a further one hides more than it costs.
LONG_ORDERS = (
    (FAR, FAR, FAR, NEAR), (NEAR, NEAR, FAR, FAR, NEAR), (NEAR, FAR, FAR, NEAR, NEAR),
)  # fmt: skip
LONG = 3
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
    in the best of these numbers, or in the largest where one was best; in two steps `FORWARD_ORDERS`, or
    `BACKWARD_ORDERS` and `LONG_ORDERS`, too. Rows take the way, in one step or in two, whose transfers take
    less time; where they take nearly the same, all is tried for both.

    Args:
        work: what one layout asks for.
        local_len: rows of each rank.
        machine: what to predict for.
        counts: stages that are settled; 0 on one rank.

    Raises:
        ValueError: it is settled which stages are near, and rows take one step; or there are rows without a
            stage.
    """
    predictor = times_of(work, local_len, machine)
    _, kinds, each_us = _fastest(predictor, machine, counts)
    cut = {kind: predictor.staged(kind) for kind in set(kinds)}
    convert_us = machine.cost_model.convert_us(local_len) if kinds[0].stages else 0.0
    each_us = each_us[0] + convert_us, each_us[1]
    return Choice(cut[kinds[0]], cut[kinds[1]], each_us, kinds[0].two_level)


def predict_us(work: Work, local_len: int, machine: Machine, counts: Counts) -> float:
    """`Choice.predicted_us` alone."""
    return _fastest(times_of(work, local_len, machine), machine, counts)[0]


def _fastest(
    predictor: NumpyTimes | CompiledTimes, machine: Machine, counts: Counts
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
    predictor: NumpyTimes | CompiledTimes,
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
                _predict_orders(predict, times_us, bool(backward))
        kinds.append(_least(times_us))
        each_us.append(times_us[kinds[-1]])
    return sum(each_us), kinds, (each_us[0], each_us[1])


def _predict_orders(
    predict: Callable[[Kind], None], times_us: dict[Kind, float], backward: bool
) -> None:
    """Adds to ``times_us``, by ``predict``, those of stages of which some are near, as far as it is likely
    that they are faster than what is there.
    """
    orders = BACKWARD_ORDERS if backward else FORWARD_ORDERS
    first, *others = (Kind(len(near), False, True, near) for near in orders)
    predict(first)
    if times_us[first] > CLOSE * min(times_us.values()):
        return
    for kind in others:
        predict(kind)
    if backward and _least(times_us).stages >= LONG:
        for near in LONG_ORDERS:
            predict(Kind(len(near), False, True, near))


def _has_both(work: Work, machine: Machine) -> bool:
    """Whether rows come from own nodes and from others."""
    per_node = machine.node_of(work.layout.cp_size)
    near = is_near(work.far, per_node)
    return bool(near.any() and not near.all())


def _least(times_us: dict[Kind, float]) -> Kind:
    """The first of the fastest."""
    limit = min(times_us.values()) * (1 + TIE)
    return next(kind for kind, time_us in times_us.items() if time_us <= limit)


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
