"""Lays out what crosses ranks and what each rank computes: stages of both directions, and travel."""

from typing import NamedTuple

import numpy as np

from magi_jax.plan.frame import Frame
from magi_jax.plan.lay_out.fit import lay_out_in
from magi_jax.plan.lay_out.stages import lay_out_both_late, lay_out_late, lay_out_stages
from magi_jax.plan.lay_out.travel import lay_out_travel
from magi_jax.plan.lay_out.ways import AUTO, LATE, Overlap, late_work, settled_counts
from magi_jax.plan.part_specs import LateSpec, StagesSpec, TravelSpec
from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.tables import LateTables, SliceTable, StageTables, TravelTables
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.overlap.choose_stages import Choice, choose_stages
from magi_jax.solver.overlap.late import largest_share, predict_us
from magi_jax.solver.overlap.own_first import OwnFirst, own_first
from magi_jax.solver.work.find_work import Work

# Late queries are taken where they are predicted to take up to so many times what stages in one step do: at
# two ranks one causal document took less with them where they are predicted 0.7 % slower.
TIE = 1.02
# A call more at the beginning of a backward pass is made where it is predicted to spare so much; less
# than that a prediction cannot tell.
CLEARLY = 0.993


class WorkTables(NamedTuple):
    """Tables of the work of a plan; ``backward`` is None when it shares those of ``forward``."""

    forward: StageTables
    backward: StageTables | None
    travel: TravelTables | None


def lay_out_work(
    work: Work,
    frame: Frame,
    overlap: Overlap,
    spec: PlanSpec | None,
    machine: Machine,
) -> WorkTables:
    """Chooses stages and lays everything out.

    Args:
        work: what the layout asks for.
        frame: identities.
        overlap: number of remote stages, or queries that are late instead of them.
        spec: sizes to lay out in; settles what ``overlap`` leaves open.
        machine: what to predict times for.

    Raises:
        ValueError: the work does not fit ``spec``.
    """
    counts = settled_counts(overlap, work)
    if overlap == LATE:
        if work.travel is not None:
            raise ValueError(
                'overlap="late" wants travelling="never": a query does one or the other'
            )
        late = late_work(work, frame, 1.0)
        if late is not None:
            travel = lay_out_travel(work, frame, spec, None)
            return WorkTables(*lay_out_both_late(late, work, frame, spec), travel)
    if spec is not None:
        travel = lay_out_travel(work, frame, spec, None)
        return WorkTables(*lay_out_in(work, frame, overlap, spec, machine), travel)
    choice = choose_stages(work, frame.local_len, machine, counts)
    per_node = machine.node_of(frame.cp_size) if choice.two_level else None
    backward = _Backward(choice, _own_first(choice, work, frame, overlap, machine), per_node)
    if overlap == AUTO and work.moves_keys:
        stages = choice.forward.num_remote_stages
        share = largest_share(work, stages, machine, frame.local_len) if stages else 0.0
        late = late_work(work, frame, share, choice.forward)
        late_us = (np.inf, np.inf) if late is None else predict_us(late, machine, work.engine)
        tie = 1.0 if choice.two_level else TIE
        staged_us = choice.each_us[0] + backward.predicted_us
        forward_late_us = late_us[0] + backward.predicted_us
        if late is not None and forward_late_us < min(sum(late_us), staged_us):
            forward = lay_out_late(late, work, frame, None)
            return WorkTables(forward, backward.lay_out(work, frame), None)
        if late is not None and sum(late_us) < staged_us * tie:
            return WorkTables(*lay_out_both_late(late, work, frame, None), None)
    travel = lay_out_travel(work, frame, None, per_node)
    forward = lay_out_stages(choice.forward, work, frame, None, per_node=per_node)
    if choice.backward is choice.forward and backward.ahead is None:
        return WorkTables(forward, None, travel)
    # The local stage is the same however many others there are.
    return WorkTables(forward, backward.lay_out(work, frame, forward.calc[0]), travel)


class _Backward(NamedTuple):
    """The backward pass in stages: those of ``choice``, or those before which some queries see own keys."""

    choice: Choice
    ahead: OwnFirst | None
    per_node: int | None

    @property
    def predicted_us(self) -> float:
        return self.choice.each_us[1] if self.ahead is None else self.ahead.predicted_us

    def lay_out(self, work: Work, frame: Frame, local: SliceTable | None = None) -> StageTables:
        if self.ahead is not None:
            return lay_out_stages(self.ahead.staged, work, frame, None, first=self.ahead.first)
        return lay_out_stages(
            self.choice.backward, work, frame, None, local=local, per_node=self.per_node
        )


def _own_first(
    choice: Choice, work: Work, frame: Frame, overlap: Overlap, machine: Machine
) -> OwnFirst | None:
    """What comes before the stages of a backward pass, where that is predicted to be clearly faster."""
    if overlap != AUTO:
        return None
    ahead = own_first(work, frame.local_len, frame.tile_size, machine)
    if ahead is None or ahead.predicted_us > CLEARLY * choice.each_us[1]:
        return None
    return ahead


def spec_of(tables: WorkTables) -> dict:
    """The fields of a `PlanSpec` that finished tables settle."""

    def stages(part: StageTables) -> StagesSpec:
        comm = tuple(m.spec for m in part.comm)
        last = None if part.late is None else late(part.late)
        first = None if part.first is None else part.first.spec
        return StagesSpec(tuple(table.spec for table in part.calc), comm, last, first)

    def late(part: LateTables) -> LateSpec:
        shared_rows = None if part.shared is None else part.shared.comm.src_rows
        return LateSpec(part.calc.spec, part.comm.spec, shared_rows)

    def travel(part: TravelTables) -> TravelSpec:
        return TravelSpec(part.calc.spec, part.comm.spec)

    forward = stages(tables.forward)
    return {
        "calc": forward.calc,
        "comm": forward.comm,
        "late": forward.late,
        "backward": None if tables.backward is None else stages(tables.backward),
        "travel": None if tables.travel is None else travel(tables.travel),
    }
