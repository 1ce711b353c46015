"""Lays work out in the sizes of a spec: what is predicted faster, or what fits."""

from collections.abc import Callable

from magi_jax.plan.frame import Frame, does_not_fit
from magi_jax.plan.lay_out.stages import lay_out_both_late, lay_out_late, lay_out_stages
from magi_jax.plan.lay_out.ways import AUTO, Overlap, late_work, settled_counts
from magi_jax.plan.part_specs import StagesSpec
from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.tables import StageTables
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.overlap.choose_stages import Counts, Settled, choose_stages
from magi_jax.solver.overlap.late import LateWork, predict_us
from magi_jax.solver.work.find_work import Work


def lay_out_in(
    work: Work, frame: Frame, overlap: Overlap, spec: PlanSpec, machine: Machine
) -> tuple[StageTables, StageTables | None]:
    """Both directions in given sizes: of the ways that fit, what is predicted to be the fastest."""
    counts = settled_counts(overlap, work)
    late = None
    if overlap == AUTO and work.moves_keys and spec.late is not None:
        late = late_work(work, frame, 1.0)
    if late is None:
        return _stages_in(work, frame, counts, spec, machine)
    first_problem = None
    for way in _ways(late, work, frame, counts, spec, machine):
        try:
            return way()
        except ValueError as problem:
            first_problem = first_problem or problem
    assert first_problem is not None, "a spec has stages or late queries"
    raise first_problem


def _ways(
    late: LateWork, work: Work, frame: Frame, counts: Counts, spec: PlanSpec, machine: Machine
) -> list[Callable[[], tuple[StageTables, StageTables | None]]]:
    """Ways for which the spec has tables, the fastest first."""
    backward = spec.backward

    def late_forward() -> tuple[StageTables, StageTables | None]:
        assert backward is not None
        forward = lay_out_late(late, work, frame, spec.forward_stages)
        return forward, _fit_stages(work, frame, counts[1], backward, "spec.backward", machine)

    # By whether the forward pass has late queries, and the backward pass.
    ways: dict[tuple[bool, bool], Callable] = {}
    if backward is None or backward.late is not None:
        ways[True, True] = lambda: lay_out_both_late(late, work, frame, spec)
    if backward is not None and (backward.comm or backward.late is None):
        ways[True, False] = late_forward
    if spec.comm:
        ways[False, False] = lambda: _stages_in(work, frame, counts, spec, machine)
    if len(ways) == 1:
        return list(ways.values())
    late_us = predict_us(late, machine)
    staged_us = choose_stages(work, frame.local_len, machine, counts).each_us

    def predicted_us(way: tuple[bool, bool]) -> float:
        return sum(late_us[i] if is_late else staged_us[i] for i, is_late in enumerate(way))

    return [ways[way] for way in sorted(ways, key=predicted_us)]


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
    if number is None and not most:
        raise does_not_fit(f"{path} has no remote stage, but keys of other ranks are needed")
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
