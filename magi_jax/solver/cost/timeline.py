"""What a step of attention should take: kernels and casts of every rank, laid side by side.

Here is what the work of a direction takes; `schedule` lays it out in time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver.cost.model import MERGE_TILE, CostModel
from magi_jax.solver.engine import compiled
from magi_jax.solver.work.stages import StageSlices


class TravelWork(NamedTuple):
    """What travelling queries take in one direction, ``[cp]`` each: way out, kernel, way back; and what it
    takes to add what comes back.
    """

    out_us: np.ndarray
    kernel_us: np.ndarray
    return_us: np.ndarray
    merge_us: float = 0.0


class DirectionWork(NamedTuple):
    """What each rank does in each of ``S`` remote stages of one direction.

    Attributes:
        kernel_us: ``[1 + S, cp]`` kernel time; stage 0 is local.
        cast_us: ``[S, cp]`` time of the cast that feeds stage ``i + 1``; in two steps of that between
            nodes.
        reduce_us: ``[S, cp]`` time of the way back of its dK and dV; zeros in the forward direction.
        merge_us: what each remote stage adds to its kernel for merging with those before, ``[S, cp]`` or one
            for all.
        travel: what travelling queries take, if any travel.
        within_us: ``[2, S, cp]`` times of the casts and the reduces inside nodes; None in one step.
        own_keys_last: whether the local stage comes after all others, as in the backward pass.
        near: in two steps, whether each stage takes that inside nodes alone; empty where none does.
        first_us: what comes before the first remote stage in one step backward, ``[cp]``; None where nothing
            does.
    """

    kernel_us: np.ndarray
    cast_us: np.ndarray
    reduce_us: np.ndarray
    merge_us: np.ndarray | float = 0.0
    travel: TravelWork | None = None
    within_us: np.ndarray | None = None
    own_keys_last: bool = False
    near: tuple[bool, ...] = ()
    first_us: np.ndarray | None = None

    @property
    def busy_us(self) -> float:
        """Kernel time of the mean rank."""
        kernel_us = self.kernel_us.sum(axis=0)
        if self.first_us is not None:
            kernel_us = kernel_us + self.first_us
        if self.travel is not None:
            kernel_us = kernel_us + self.travel.kernel_us
        return float(kernel_us.mean())


class Timeline(NamedTuple):
    """When things happen on each rank in one direction, microseconds.

    Attributes:
        compute: ``[1 + S, cp, 2]`` begin and end of each stage's kernel.
        cast: ``[S, cp, 2]`` begin and end of each cast.
        reduce: ``[S, cp, 2]`` begin and end of each reduce; of zero length in the forward direction.
        travel: ``[3, cp, 2]`` begin and end of the cast, the kernel and the return of travelling
            queries; of zero length where none travel.
        within: ``[2, S, cp, 2]`` begin and end of the steps of casts and reduces inside nodes; of zero
            length in one step.
    """

    compute: np.ndarray
    cast: np.ndarray
    reduce: np.ndarray
    travel: np.ndarray
    within: np.ndarray

    @property
    def predicted_us(self) -> float:
        """When the last rank is done."""
        return float(max(part[..., 1].max(initial=0.0) for part in self))

    def efficiency(self, busy_us: float) -> float:
        """``busy_us`` of the mean rank over the predicted time; 1.0 when there is nothing to do."""
        predicted_us = self.predicted_us
        return float(busy_us / predicted_us) if predicted_us > 0 else 1.0


def link_rows(traffic: np.ndarray, ranks_per_node: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that hold a rank up, inside its node and across nodes, ``[..., cp]`` each.

    A rank is held up by what it receives or by what it sends, whichever is more; rows cross nodes once
    for each rank that needs them.

    Args:
        traffic: rows from source to destination, ``[..., cp, cp]``.
        ranks_per_node: ranks of a node.
    """
    node = np.arange(traffic.shape[-1]) // ranks_per_node
    crosses = node[:, None] != node
    far = traffic * crosses
    all_in, all_out = traffic.sum(axis=-2), traffic.sum(axis=-1)
    far_in, far_out = far.sum(axis=-2), far.sum(axis=-1)
    return np.maximum(all_in - far_in, all_out - far_out), np.maximum(far_in, far_out)


class Shapes(NamedTuple):
    """What kernel times of some stages depend on.

    Attributes:
        num_stages, cp_size: of the times that they give.
        group: ``[A]`` stage and rank of each slice, as ``stage * cp_size + rank``.
        area, log_keys: ``[A]`` see `CostModel.shapes`.
        rows: ``[num_stages, cp]`` query rows in tiles of `MERGE_TILE` in which any sees a key.
    """

    num_stages: int
    cp_size: int
    group: np.ndarray
    area: np.ndarray
    log_keys: np.ndarray
    rows: np.ndarray

    def kernel_us(self, model: CostModel, backward: bool) -> np.ndarray:
        """Kernel time of each rank in each stage, ``[num_stages, cp]``."""
        times_us = model.times_us(self.area, self.log_keys, backward)
        sums = np.bincount(self.group, times_us, self.num_stages * self.cp_size)
        return sums.reshape(self.num_stages, self.cp_size)


def shapes_of(
    stages: Sequence[StageSlices], cp_size: int, model: CostModel, engine: str = "numpy"
) -> Shapes:
    """Shapes of the slices of stages; both engines measure the same areas."""
    group = np.concatenate([i * cp_size + stage.rank for i, stage in enumerate(stages)])
    slices = np.concatenate([stage.slices for stage in stages])
    area = compiled().areas(slices) if engine == "compiled" else None
    rows = _touched_rows(slices, group, len(stages) * cp_size).reshape(len(stages), cp_size)
    return Shapes(len(stages), cp_size, group, *model.shapes(slices, area), rows)


def _touched_rows(slices: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """Rows of the query tiles of each group in which any query sees a key, ``[num_groups]``."""
    begin = slices[:, bands.Q_START] // MERGE_TILE
    end = -(-slices[:, bands.Q_END] // MERGE_TILE)
    width = int(end.max(initial=0)) + 1
    steps = np.bincount(group * width + begin, minlength=num_groups * width)
    steps -= np.bincount(group * width + end, minlength=num_groups * width)
    covered = np.cumsum(steps.reshape(num_groups, width), axis=1) > 0
    return MERGE_TILE * covered.sum(axis=1)


def direction_work(
    shapes: Shapes,
    rows: tuple[np.ndarray, np.ndarray],
    merges: bool,
    model: CostModel,
    backward: bool,
    travel: TravelWork | None = None,
    two_level: bool = False,
    near: tuple[bool, ...] = (),
) -> DirectionWork:
    """Times of the stages of one direction.

    Args:
        shapes: of the slices of stage 0 and of the ``S`` remote stages.
        rows: that hold each rank up in each remote stage, as `link_rows` gives them.
        merges: whether stages are merged with those before; late queries are not.
        model: the machine.
        backward: which direction.
        travel: of travelling queries.
        two_level: whether these rows move in two steps, across nodes and then inside.
        near: stages that take the second step alone, as in `DirectionWork`.
    """
    kernel_us = shapes.kernel_us(model, backward)
    steps = _steps(rows) if two_level else (rows,)
    times_us = np.zeros((2, len(steps), *rows[0].shape))
    times_us[0] = [model.cast_us(*step) for step in steps]
    if backward:
        times_us[1] = [model.reduce_us(*step) for step in steps]
    (cast_us, reduce_us), within_us = times_us[:, 0], times_us[:, 1] if two_level else None
    merge_us = model.merge_us(shapes.rows[1:] * merges, backward)
    times = kernel_us, cast_us, reduce_us, merge_us
    return DirectionWork(*times, travel, within_us, backward, near)


def travel_work(
    away: StageSlices,
    rows: tuple[np.ndarray, np.ndarray],
    local_len: int,
    model: CostModel,
    backward: bool,
    two_level: bool = False,
) -> TravelWork:
    """Times of travelling queries.

    Args:
        away: slices at the owners of keys.
        rows: that go there and hold each rank up, as `link_rows` gives them.
        local_len: rows of each rank, with which what comes back is merged.
        model: the machine.
        backward: which direction.
        two_level: whether these rows move in two steps, one after the other.
    """
    steps = _steps(rows) if two_level else (rows,)
    out_us, back_us = (
        np.sum([model.move_us(*step, size) for step in steps], axis=0)
        for size in model.travel_bytes(backward)
    )
    kernel_us = shapes_of([away], len(rows[0]), model).kernel_us(model, backward)[0]
    return TravelWork(out_us, kernel_us, back_us, float(model.merge_us(local_len, backward)))


def _steps(rows: tuple[np.ndarray, np.ndarray]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Rows inside nodes and across, as a step across and then one inside."""
    near, far = rows
    return (np.zeros_like(near), far), (near, np.zeros_like(far))
