"""Lays out queries that travel: their cast to the owners of keys, and their work there."""

from magi_jax.plan.comm_spec import CommSpec
from magi_jax.plan.frame import Frame, does_not_fit
from magi_jax.plan.lay_out.stages import stage_table
from magi_jax.plan.part_specs import TravelSpec
from magi_jax.plan.slice_table import empty_table
from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.tables import TravelTables
from magi_jax.plan.two_level import empty_transfer, lay_out_transfer
from magi_jax.solver.work import transfer
from magi_jax.solver.work.find_work import Travel, Work


def lay_out_travel(
    work: Work, frame: Frame, spec: PlanSpec | None, ranks_per_node: int | None
) -> TravelTables | None:
    """Tables of queries that travel, in the sizes of ``spec`` if it is given; None where there is no room
    for any and none travel. ``ranks_per_node`` are the ranks of a node where transfers take two steps and
    no spec settles that.

    Raises:
        ValueError: they do not fit.
    """
    wanted = None if spec is None else spec.travel
    if work.travel is None:
        return None if wanted is None else empty_travel(wanted)
    if spec is not None and wanted is None:
        raise does_not_fit("spec.travel is None, but queries travel")
    return _travel_tables(work.travel, work, frame, wanted, ranks_per_node)


def _travel_tables(
    travel: Travel,
    work: Work,
    frame: Frame,
    wanted: TravelSpec | None,
    ranks_per_node: int | None,
) -> TravelTables:
    comm = lay_out_transfer(
        transfer.stage_pieces(travel.moved, 0),
        CommSpec(frame.cp_size, frame.local_len, 0, 0, 0, 0),
        None if wanted is None else wanted.comm,
        "spec.travel.comm",
        work.engine,
        ranks_per_node,
    )
    calc = stage_table(
        travel.away,
        frame,
        (comm.dst_rows, work.keys.local_len),
        None if wanted is None else wanted.calc,
        "spec.travel.calc",
        work.engine,
    )
    return TravelTables(comm, calc)


def empty_travel(spec: TravelSpec) -> TravelTables:
    """Tables of a plan of which no query travels."""
    return TravelTables(empty_transfer(spec.comm), empty_table(spec.calc, spec.comm.cp_size))
