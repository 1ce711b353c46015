"""Lays work out in the sizes of a spec: what is predicted faster, or what fits."""

from magi_jax.plan.frame import Frame
from magi_jax.plan.lay_out.stages import lay_out_both_late, lay_out_late, lay_out_stages
from magi_jax.plan.lay_out.ways import AUTO, Overlap, late_work, settled_counts
from magi_jax.plan.spec import PlanSpec, StagesSpec
from magi_jax.plan.tables import StageTables
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.overlap.choose_stages import Counts, Settled, choose_stages
from magi_jax.solver.overlap.late import LateWork, predict_us
from magi_jax.solver.work.find_work import Work


def lay_out_in(
    work: Work, frame: Frame, overlap: Overlap, spec: PlanSpec, machine: Machine
) -> tuple[StageTables, StageTables | None]:
    """Both directions in given sizes: with late queries or in stages, what is predicted faster and fits."""
    counts = settled_counts(overlap, work)
    late = None
    if overlap == AUTO and spec.late is not None:
        late = late_work(work, frame, 1.0)
    if late is None:
        return _stages_in(work, frame, counts, spec, machine)
    if not spec.comm:
        return _late_in(late, work, frame, counts, spec, machine)
    ways = [
        lambda: _late_in(late, work, frame, counts, spec, machine),
        lambda: _stages_in(work, frame, counts, spec, machine),
    ]
    staged_us = choose_stages(work, frame.local_len, machine, counts).predicted_us
    if sum(predict_us(late, machine)) > staged_us:
        ways.reverse()
    try:
        return ways[0]()
    except ValueError:
        return ways[1]()


def _late_in(
    late: LateWork, work: Work, frame: Frame, counts: Counts, spec: PlanSpec, machine: Machine
) -> tuple[StageTables, StageTables | None]:
    """With late queries, in the backward pass too unless the spec has stages alone there."""
    if spec.backward is None or spec.backward.late is not None:
        return lay_out_both_late(late, work, frame, spec)
    forward = lay_out_late(late, work, frame, spec.forward_stages)
    return forward, _fit_stages(work, frame, counts[1], spec.backward, "spec.backward", machine)


def _stages_in(
    work: Work, frame: Frame, counts: Counts, spec: PlanSpec, machine: Machine
) -> tuple[StageTables, StageTables | None]:
    """As many stages as there are, or fewer where those do not fit."""
    forward, backward = counts
    if spec.backward is None and forward != backward:
        raise ValueError(
            f"overlap={counts} wants stages of their own for the backward pass, the spec has none"
        )
    first = _fit_stages(work, frame, forward, spec.forward_stages, "spec", machine)
    if spec.backward is None:
        return first, None
    return first, _fit_stages(work, frame, backward, spec.backward, "spec.backward", machine)


def _fit_stages(
    work: Work, frame: Frame, count: Settled, spec: StagesSpec, path: str, machine: Machine
) -> StageTables:
    most = len(spec.comm)
    number = len(count) if isinstance(count, tuple) else count
    if number is not None and number > most:
        raise ValueError(
            f"overlap={count} wants {number} remote stages, the spec has {most} of them"
        )
    first_problem = None
    for stages in range(most, 0, -1) if number is None else (number,):
        near = spec.near[:stages]
        settled = count if isinstance(count, tuple) else near if any(near) else stages
        try:
            choice = choose_stages(work, frame.local_len, machine, (settled, settled))
            staged = choice.forward if path == "spec" else choice.backward
            return lay_out_stages(staged, work, frame, spec, path)
        except ValueError as problem:
            first_problem = first_problem or problem
    raise first_problem or AssertionError("a spec has at least one remote stage")
