"""The knobs of planning."""

import itertools
import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from magi_jax.plan.lay_out.ways import AUTO, LATE, Overlap
from magi_jax.plan.solve import Travelling
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.dispatch.effort import EFFORTS
from magi_jax.solver.dispatch.strategies import STRATEGIES
from magi_jax.solver.engine import check_engine
from magi_jax.solver.slice_table import TILE_SIZE


def positive(name: str, value: Any) -> int:
    """A Python integer of at least 1: those of NumPy are equal to it, but not in a fingerprint."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def settled_overlap(overlap: Any) -> Overlap:
    """Numbers of stages as Python integers; raises ValueError for what is none of `PlanConfig.overlap`."""
    if isinstance(overlap, str) and overlap in (AUTO, LATE):
        return overlap
    counts = overlap if isinstance(overlap, tuple) else (overlap,) * 2
    if len(counts) != 2 or not all(map(_names_stages, counts)):
        raise ValueError(
            'overlap must be "auto", "late", an integer of at least 1, or a pair of them or of tuples'
            f" of bools, got {overlap!r}"
        )
    forward, backward = (n if isinstance(n, tuple) else int(n) for n in counts)
    return (forward, backward) if isinstance(overlap, tuple) else forward


def _names_stages(count: Any) -> bool:
    """Whether this settles the stages of a direction."""
    if isinstance(count, tuple):
        return any(count) and all(isinstance(is_near, bool) for is_near in count)
    return isinstance(count, int | np.integer) and bool(count >= 1)


def settled_travelling(travelling: Any) -> Travelling:
    """Ranges as tuples of Python integers; raises ValueError for what is none of `PlanConfig.travelling`."""
    if isinstance(travelling, str):
        if travelling not in ("auto", "never"):
            raise ValueError(f'travelling must be "auto", "never" or ranges, got {travelling!r}')
        return travelling
    try:
        ranges = tuple((operator.index(begin), operator.index(end)) for begin, end in travelling)
    except (TypeError, ValueError):
        raise ValueError(
            f'travelling must be "auto", "never" or ranges ((begin, end), ...), got {travelling!r}'
        ) from None
    flat = [0, *(edge for pair in ranges for edge in pair)]
    if any(a > b for a, b in itertools.pairwise(flat)) or any(a == b for a, b in ranges):
        raise ValueError(
            f"travelling must list rising disjoint ranges (begin, end), got {travelling}"
        )
    return ranges


def settled_roll_shifts(shifts: Any) -> tuple[int, ...]:
    """Shifts as Python integers; raises ValueError for what is none of `PlanConfig.roll_shifts`."""
    try:
        settled = tuple(map(operator.index, shifts))
    except TypeError:
        raise ValueError(f"roll_shifts must list integers, as (-1,) does, got {shifts!r}") from None
    if len(set(settled)) != len(settled):
        raise ValueError(f"roll_shifts names a shift twice: {settled}")
    return settled


@dataclass(frozen=True)
class PlanConfig:
    """How a plan is made. Hashable; no knob changes results, only where and when they are computed.

    Attributes:
        seq_len: tokens of the sequence, of which a mask may fill a part; None takes the mask's
            length.
        chunk_size: tokens that move together in the dispatch; fewer where ranks would stay empty. None
            chooses the largest power of two that leaves each rank eight chunks, within [128, 1024].
        dispatch: name of the strategy that gives chunks to ranks: "balanced", "lpt", "zigzag" or
            "contiguous".
        ranks_per_node: ranks that share a fast link; "balanced" counts rows that enter a node as well.
            None takes all ranks for one node.
        two_level: whether each row crosses to a node once and is passed on inside it, and gradients are
            summed in the node before they cross, instead of one transfer for each rank: True, False, or
            "auto" where ``cost_model`` predicts less time for it. True needs ``ranks_per_node``. Late queries
            take one step in any case.
        effort: "fast" for planning every batch, "high" for planning ahead in background workers; how
            long "balanced" searches. "high" takes what "fast" finds where ``cost_model`` predicts clearly
            less time for that.
        engine: "compiled" or "numpy"; both make the same plans, in milliseconds and in
            seconds (with effort "high" in minutes).
        overlap: number of remote stages (at least 1), of both directions or ``(forward, backward)``;
            "late": none, but queries that need remote keys are computed last and at once; or "auto": what
            ``cost_model`` predicts to take least time, of late queries where they are few and, for each
            direction, of 1 to 4 stages. Where rows take two steps, one of a pair may list its stages instead:
            whether each has keys of the own node alone (True) or those of others (False); "auto" looks at
            some such lists too, and has no stage where no key comes from another rank.
        travelling: query rows that go to the owners of their keys instead of having keys brought: "auto",
            where ``cost_model`` predicts less time for it; "never"; or rising disjoint ranges
            ``((begin, end), ...)``.
        cost_model: rates of the machine.
        roll_shifts: shifts for which the plan holds a roll transfer.
        tile_size: rows of a tile in the slice tables; the kernels of this package read 128.
    """

    seq_len: int | None = None
    chunk_size: int | None = None
    dispatch: str = "balanced"
    ranks_per_node: int | None = None
    two_level: bool | str = "auto"
    effort: str = "fast"
    engine: str = "compiled"
    overlap: Overlap = "auto"
    travelling: Travelling = "auto"
    cost_model: CostModel = field(default_factory=CostModel)
    roll_shifts: tuple[int, ...] = (-1,)
    tile_size: int = TILE_SIZE

    def __post_init__(self):
        for name in ("seq_len", "chunk_size", "ranks_per_node", "tile_size"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, positive(name, value))
        if self.dispatch not in STRATEGIES:
            raise ValueError(f"dispatch must be one of {sorted(STRATEGIES)}, got {self.dispatch!r}")
        if self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {sorted(EFFORTS)}, got {self.effort!r}")
        check_engine(self.engine)
        self._check_two_level()
        object.__setattr__(self, "overlap", settled_overlap(self.overlap))
        object.__setattr__(self, "travelling", settled_travelling(self.travelling))
        if not isinstance(self.cost_model, CostModel):
            raise ValueError(f"cost_model must be a CostModel, got {self.cost_model!r}")
        object.__setattr__(self, "roll_shifts", settled_roll_shifts(self.roll_shifts))

    @property
    def machine(self) -> Machine:
        """What times are predicted for."""
        return Machine(self.ranks_per_node, self.cost_model, self.two_level)

    def _check_two_level(self) -> None:
        if self.two_level not in ("auto", True, False):
            raise ValueError(f'two_level must be True, False or "auto", got {self.two_level!r}')
        if self.two_level is True and self.ranks_per_node is None:
            raise ValueError("two_level=True needs ranks_per_node, which is None")
