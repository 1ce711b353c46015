"""What a step of attention should take: kernels and casts of every rank, laid side by side.

A rank has one compute stream and one communication stream. The cast of a stage is issued when the
attention of the stage before it starts; the dK and dV of a stage leave when its attention is done.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.stages import StageSlices


class StageWork(NamedTuple):
    """What each rank does in each stage of one plan, for ``S`` remote stages.

    Attributes:
        forward_us, backward_us: ``[1 + S, cp]`` kernel time; stage 0 is local.
        cast_us: ``[S, cp]`` time of the cast that feeds stage ``i + 1``.
        reduce_us: ``[S, cp]`` time of the way back of its dK and dV.
        merge_us: what each remote stage adds to its kernel for merging with those before.
    """

    forward_us: np.ndarray
    backward_us: np.ndarray
    cast_us: np.ndarray
    reduce_us: np.ndarray
    merge_us: float = 0.0


class Timeline(NamedTuple):
    """When things happen on each rank in one direction, microseconds.

    Attributes:
        compute: ``[1 + S, cp, 2]`` begin and end of each stage's kernel.
        cast: ``[S, cp, 2]`` begin and end of each cast.
        reduce: ``[S, cp, 2]`` begin and end of each reduce; of zero length in the forward direction.
    """

    compute: np.ndarray
    cast: np.ndarray
    reduce: np.ndarray

    @property
    def predicted_us(self) -> float:
        """When the last rank is done."""
        ends = [part[..., 1].max(initial=0.0) for part in self]
        return float(max(ends))

    def efficiency(self, kernel_us: np.ndarray) -> float:
        """Mean of ``kernel_us [1 + S, cp]`` over the predicted time; 1.0 when there is nothing to do."""
        predicted_us = self.predicted_us
        busy_us = kernel_us.sum(axis=0).mean()
        return float(busy_us / predicted_us) if predicted_us > 0 else 1.0


def move_times(
    traffic: np.ndarray, ranks_per_node: int, model: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """Times of casts and of reduces, ``[S, cp]`` each, from rows ``traffic [S, cp (source), cp]``.

    A rank is held up by what it receives or by what it sends, whichever is more; rows cross nodes once
    for each rank that needs them.
    """
    node = np.arange(traffic.shape[-1]) // ranks_per_node
    crosses = node[:, None] != node
    near, far = traffic * ~crosses, traffic * crosses
    near_rows = np.maximum(near.sum(axis=1), near.sum(axis=2))
    far_rows = np.maximum(far.sum(axis=1), far.sum(axis=2))
    return model.cast_us(near_rows, far_rows), model.reduce_us(near_rows, far_rows)


def stage_work(
    stages: list[StageSlices],
    traffic: np.ndarray,
    local_len: int,
    ranks_per_node: int,
    model: CostModel,
) -> StageWork:
    """Times of a plan's stages.

    Args:
        stages: local slices of stage 0 and of the ``S`` remote stages.
        traffic: ``[S, cp, cp]`` rows from source (second axis) to destination.
        local_len: rows of each rank.
        ranks_per_node: ranks of a node.
        model: the machine.
    """
    forward_us, backward_us = _kernel_us(stages, traffic.shape[-1], model)
    cast_us, reduce_us = move_times(traffic, ranks_per_node, model)
    return StageWork(forward_us, backward_us, cast_us, reduce_us, model.merge_us(local_len))


def _kernel_us(
    stages: list[StageSlices], cp_size: int, model: CostModel, key_parts: int = 1
) -> list[np.ndarray]:
    """Kernel times ``[len(stages), cp]`` of the forward and of the backward pass."""
    return [
        np.stack(
            [
                np.bincount(stage.rank, model.kernel_us(stage.slices, backward, key_parts), cp_size)
                for stage in stages
            ]
        )
        for backward in (False, True)
    ]


def simulate(work: StageWork, backward: bool = False) -> Timeline:
    """Lays the stages of one direction out in time."""
    kernel_us = work.backward_us if backward else work.forward_us
    reduce_us = work.reduce_us if backward else np.zeros_like(work.reduce_us)
    num_stages, cp_size = work.cast_us.shape
    compute = np.zeros((num_stages + 1, cp_size, 2))
    cast, reduce = np.zeros((num_stages, cp_size, 2)), np.zeros((num_stages, cp_size, 2))
    link_free, arrived, kernel_free = np.zeros(cp_size), np.zeros(cp_size), np.zeros(cp_size)
    for stage in range(num_stages + 1):
        begin = np.maximum(kernel_free, arrived)
        kernel_free = begin + kernel_us[stage] + work.merge_us * (stage > 0)
        compute[stage] = np.stack([begin, kernel_free], axis=1)
        if stage < num_stages:  # issued first, so that it is ahead of this stage's reduce
            start = np.maximum(link_free, begin)
            link_free = arrived = start + work.cast_us[stage]
            cast[stage] = np.stack([start, link_free], axis=1)
        if stage > 0:
            start = np.maximum(link_free, kernel_free)
            link_free = start + reduce_us[stage - 1]
            reduce[stage - 1] = np.stack([start, link_free], axis=1)
    return Timeline(compute, cast, reduce)


def even_stages(
    stages: list[StageSlices],
    traffic: np.ndarray,
    local_len: int,
    ranks_per_node: int,
    model: CostModel,
    most: int = 4,
) -> list[StageWork]:
    """The work of a plan when its one remote stage is cut into 1, 2, ... ``most`` equal ones.

    Rows and area of a rank are spread evenly over its stages. Other arguments as in `stage_work`.
    """
    whole = stage_work(stages, traffic, local_len, ranks_per_node, model)
    return [
        _split(whole, _kernel_us(stages[1:], traffic.shape[-1], model, parts), parts, model)
        for parts in range(1, most + 1)
    ]


def splitting_is_vain(
    traffic: np.ndarray, local_len: int, ranks_per_node: int, model: CostModel
) -> bool:
    """Whether one remote stage is best whatever the kernels take: all that a second could hide is less
    than what merging it costs. Arguments as in `stage_work`.
    """
    cast_us, reduce_us = move_times(traffic, ranks_per_node, model)
    hidden_us = 2 * cast_us.max(initial=0.0) + reduce_us.max(initial=0.0)
    return bool(hidden_us <= 2 * model.merge_us(local_len))


def _split(whole: StageWork, far_us: list[np.ndarray], parts: int, model: CostModel) -> StageWork:
    """``whole`` in ``parts`` remote stages whose kernels take ``far_us`` (forward, backward) together."""
    share = np.ones((parts, 1)) / parts

    def moves(total_us):
        return share * np.maximum(total_us - model.latency_us, 0.0) + model.latency_us * (
            total_us > 0
        )

    return whole._replace(
        forward_us=np.concatenate([whole.forward_us[:1], share * far_us[0]]),
        backward_us=np.concatenate([whole.backward_us[:1], share * far_us[1]]),
        cast_us=moves(whole.cast_us),
        reduce_us=moves(whole.reduce_us),
    )


def fastest(works: list[StageWork]) -> int:
    """Index of the work with the least time of forward and backward together."""
    times_us = [
        sum(simulate(work, backward).predicted_us for backward in (False, True)) for work in works
    ]
    return int(np.argmin(times_us))
