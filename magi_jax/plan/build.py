"""`make_plan`: from a mask to an `AttentionPlan`."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from magi_jax.masks.attn_mask import AttnMask, require_mask
from magi_jax.plan.attention_plan import AttentionPlan, assemble
from magi_jax.plan.config import PlanConfig, positive
from magi_jax.plan.frame import Frame, check_mask, require_frame
from magi_jax.plan.lay_out.dispatch import lay_out_dispatch
from magi_jax.plan.lay_out.work import lay_out_work
from magi_jax.plan.solve import machine_of, settle_work, travelling_ranges
from magi_jax.plan.spec import PlanSpec
from magi_jax.solver import dispatch
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.dispatch.strategies import STRATEGIES
from magi_jax.solver.overlap.travelling import Ranges, split_slices
from magi_jax.solver.work.find_work import Keys
from magi_jax.solver.work.join import join_diagonals

# What `chunk_size=None` aims for: enough chunks to balance with, each long enough to move well.
CHUNKS_PER_RANK = 8
MIN_CHUNK, MAX_CHUNK = 128, 1024
# Predicted times that differ by less tell nothing: what is simulated is off by as much and more.
CLEARLY = 0.98


def make_plan(
    mask: AttnMask, cp_size: int, config: PlanConfig | None = None, spec: PlanSpec | None = None
) -> AttentionPlan:
    """Plans self-attention under ``mask`` over ``cp_size`` ranks. Runs on the host, in NumPy alone.

    Planning is deterministic: every process that plans the same mask gets the same plan.

    Args:
        mask: the mask, with ``q_len == k_len``.
        cp_size: number of ranks.
        config: the knobs; None takes the defaults.
        spec: sizes to lay the plan out in, so that it fits a program that is compiled already; None
            takes the plan's own sizes, rounded up to buckets. A spec also settles what the config
            leaves open: sequence length, chunk size, number of stages. The mask may be shorter than
            ``spec.seq_len``.

    Returns:
        A plan with NumPy leaves.

    Raises:
        TypeError: an argument is of another kind, such as a dense mask.
        ValueError: the mask is not square or is longer than the sequence, or the spec is too small
            or of another kind; the first such size is named.
    """
    started = time.perf_counter()
    require_mask(mask)
    config = PlanConfig() if config is None else config
    _require("config", config, PlanConfig)
    if spec is not None:
        _require("spec", spec, PlanSpec)
    frame = _make_frame(mask, cp_size, config, spec)
    machine = machine_of(config.machine, frame.cp_size, spec)
    slices = join_diagonals(mask.slices, config.engine)
    ranges = travelling_ranges(config.travelling, slices, frame, machine, spec)
    problem = _problem(slices, ranges, frame, config)

    def lay_out(layout: dispatch.Layout) -> AttentionPlan:
        work = settle_work(
            slices, ranges, layout, Keys(layout, frame.local_len), machine, config.engine,
            may_stay=config.travelling == "auto",
        )  # fmt: skip
        dispatched, rolls = lay_out_dispatch(layout, frame, spec, config.engine)
        tables = lay_out_work(work, frame, config.overlap, spec, machine)
        planning_ms = (time.perf_counter() - started) * 1e3
        return assemble(frame, dispatched, rolls, tables, planning_ms)

    layouts = _layouts(problem, config.dispatch)
    if len(layouts) == 1:
        return lay_out(layouts[0])
    plan = _take(layouts, lay_out, config.cost_model, machine.node_of(frame.cp_size))
    return dataclasses.replace(plan, planning_ms=(time.perf_counter() - started) * 1e3)


def _layouts(problem: dispatch.DispatchProblem, strategy: str) -> list[dispatch.Layout]:
    """Layouts to choose from, the one that moves fewer rows first."""
    efforts = (
        ["high", "fast"] if (strategy, problem.effort) == ("balanced", "high") else [problem.effort]
    )
    layouts = [
        dispatch.make_layout(STRATEGIES[strategy](problem._replace(effort=effort)), problem.cp_size)
        for effort in efforts
    ]
    same = all(map(np.array_equal, layouts[0][:3], layouts[-1][:3]))
    return layouts[:1] if same else layouts


def _take(
    layouts: list[dispatch.Layout],
    lay_out: Callable[[dispatch.Layout], AttentionPlan],
    cost_model: CostModel | None,
    ranks_per_node: int,
) -> AttentionPlan:
    """The plan of the first layout, unless another is predicted to be faster by more than predictions can
    tell; of those that fit.
    """
    plans, problems = [], []
    for layout in layouts:
        try:
            plans.append(lay_out(layout))
        except ValueError as problem:
            problems.append(problem)
    if not plans:
        raise problems[0]
    times_us = [plan.report(cost_model, ranks_per_node).predicted_us for plan in plans]
    fastest = int(np.argmin(times_us))
    return plans[fastest if times_us[fastest] < times_us[0] * CLEARLY else 0]


def _require(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or None, got {type(value).__name__}")


def _problem(
    slices: np.ndarray, ranges: Ranges, frame: Frame, config: PlanConfig
) -> dispatch.DispatchProblem:
    home, travelling = split_slices(slices, ranges)
    model = config.cost_model
    row_bytes = sum(model.travel_bytes(backward=False))
    return dispatch.DispatchProblem(
        home,
        dispatch.chunk_edges(frame.seq_len, frame.chunk_size),
        frame.cp_size,
        config.ranks_per_node,
        config.effort,
        config.engine,
        travelling,
        row_bytes / model.kv_row_bytes(model.dtype_bytes),
    )


def _make_frame(mask: AttnMask, cp_size: int, config: PlanConfig, spec: PlanSpec | None) -> Frame:
    """Settles the identities of the plan from mask, config and spec, and checks them."""
    cp_size = positive("cp_size", cp_size)
    seq_len = config.seq_len or (mask.q_len if spec is None else spec.seq_len)
    if seq_len < 1:
        raise ValueError("a plan needs at least one token, the mask has none")
    check_mask(mask, seq_len)
    chunk_size = config.chunk_size or (
        _auto_chunk_size(seq_len, cp_size) if spec is None else spec.chunk_size
    )
    # No rank stays empty for want of chunks.
    chunk_size = min(chunk_size, -(-seq_len // cp_size))
    num_chunks = -(-seq_len // chunk_size)
    local_len = min(-(-num_chunks // cp_size) * chunk_size, seq_len)
    frame = Frame(cp_size, seq_len, chunk_size, local_len, config.tile_size, config.roll_shifts)
    if spec is not None:
        require_frame(spec, frame)
    return frame


def _auto_chunk_size(seq_len: int, cp_size: int) -> int:
    """Largest power of two that leaves each rank `CHUNKS_PER_RANK` chunks, within limits."""
    target = max(seq_len // (cp_size * CHUNKS_PER_RANK), 1)
    power = 1 << (target.bit_length() - 1)
    return max(min(power, MAX_CHUNK), min(MIN_CHUNK, -(-seq_len // cp_size)))
