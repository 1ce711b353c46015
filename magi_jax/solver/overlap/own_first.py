"""Some queries against own keys before the first remote stage of a backward pass, whose fetch they hide.

Own keys come last there, to hide the way back of the last gradients. Without these queries the first fetch
has nothing to hide behind, and is the longer the fewer stages there are.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver.cost import schedule, timeline
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.work.find_work import Work, traffic
from magi_jax.solver.work.stages import Staged, StageSlices

# Of more ranks none was timed; there a call more counts for more, and a fetch for less.
MOST_RANKS = 2
MOST_STAGES = 2


class OwnFirst(NamedTuple):
    """Stages of a backward pass, and what comes before them.

    Attributes:
        staged: its stages; stage 0 is that of the other queries.
        first: some queries against own keys, in local coordinates.
        predicted_us: time that is predicted.
    """

    staged: Staged
    first: StageSlices
    predicted_us: float


def own_first(work: Work, local_len: int, tile_size: int, machine: Machine) -> OwnFirst | None:
    """The stages for which this is predicted to be the fastest; None where it is not looked at."""
    cp_size, model = work.layout.cp_size, machine.cost_model
    if cp_size > MOST_RANKS or work.travel is not None or not work.moves_keys:
        return None
    found = []
    for stages in range(1, MOST_STAGES + 1):
        first, staged = split_first(work.staged(stages), local_len, tile_size)
        rows = timeline.link_rows(traffic(staged.remote, stages, cp_size), cp_size)
        shapes = timeline.shapes_of(staged.slices, cp_size, model, work.engine)
        timed = timeline.direction_work(shapes, rows, True, model, backward=True)
        of_first = timeline.shapes_of([first], cp_size, model, work.engine)
        timed = timed._replace(first_us=first_us(of_first, model))
        found.append(OwnFirst(staged, first, schedule.simulate(timed).predicted_us))
    return min(found, key=lambda each: each.predicted_us)


def split_first(staged: Staged, local_len: int, tile_size: int) -> tuple[StageSlices, Staged]:
    """The first half of each rank's rows against own keys, in whole tiles, and stages without it.

    Under a causal mask that is a quarter of what own keys are seen by: more than a fetch takes, and the
    gradients of the last stage, in float32 twice as much, have the rest.
    """
    half = local_len // 2 // tile_size * tile_size
    home = staged.slices[0]
    first, rest = (
        _visible(bands.clip(home.slices, **part), home.rank)
        for part in ({"q_end": half}, {"q_start": half})
    )
    return first, staged._replace(slices=[rest, *staged.slices[1:]])


def first_us(shapes: timeline.Shapes, model: CostModel) -> np.ndarray:
    """Time of what comes first, ``[cp]``, with what one more call costs."""
    return shapes.kernel_us(model, True)[0] + float(model.merge_us(0, backward=True))


def _visible(slices: np.ndarray, rank: np.ndarray) -> StageSlices:
    seen = bands.is_visible(slices)
    return StageSlices(slices[seen], rank[seen])
