"""Lays late queries out: which rows they are, the cast of their keys, and their slice table."""

import numpy as np

from magi_jax.plan.frame import Frame
from magi_jax.plan.lay_out import comm_meta, empty_comm
from magi_jax.plan.slice_table import build_table, empty_table
from magi_jax.plan.spec import MIN_BUFFER_ROWS, CommSpec, LateSpec, bucket
from magi_jax.plan.tables import LateTables
from magi_jax.solver import intervals, transfer
from magi_jax.solver.late import LateRows, LateWork
from magi_jax.solver.work import Keys


def late_tables(
    late: LateWork, keys: Keys, frame: Frame, wanted: LateSpec | None, path: str, engine: str
) -> LateTables:
    """Tables of late queries.

    Args:
        late: which they are and what they see.
        keys: where keys are.
        frame: identities of the plan.
        wanted: sizes to lay out in; None takes those needed, rounded up to buckets.
        path: what to call ``wanted`` in errors.
        engine: "numpy" or "compiled".

    Raises:
        ValueError: ``wanted`` is too small.
    """
    comm = comm_meta(
        transfer.stage_pieces(late.keys, 0),
        CommSpec(frame.cp_size, keys.local_len, 0, 0, 0, 0),
        None if wanted is None else wanted.comm,
        f"{path}.comm",
        engine,
    )
    num_rows = bucket(int(late.rows.held.max(initial=0)), MIN_BUFFER_ROWS)
    if wanted is not None:
        num_rows = max(num_rows, wanted.calc.q_len)
    calc = build_table(
        late.slices.slices, np.asarray(late.slices.rank, np.int64), frame.cp_size, num_rows,
        comm.dst_rows, frame.tile_size, engine, None if wanted is None else wanted.calc, f"{path}.calc",
    )  # fmt: skip
    return LateTables(_row_table(late.rows, num_rows, frame), comm, calc)


def empty_late(spec: LateSpec, local_len: int) -> LateTables:
    """Tables of a plan in which no query is late."""
    cp_size = spec.comm.cp_size
    rows = no_rows(cp_size, spec.calc.q_len, local_len)
    return LateTables(rows, empty_comm(spec.comm), empty_table(spec.calc, cp_size))


def no_rows(cp_size: int, num_rows: int, local_len: int) -> np.ndarray:
    """Rows of late buffers that hold none: past the end, and no two of them the same."""
    rows = local_len + np.arange(num_rows, dtype=np.int32)
    return np.broadcast_to(rows, (cp_size, num_rows)).copy()


def _row_table(rows: LateRows, num_rows: int, frame: Frame) -> np.ndarray:
    table = no_rows(frame.cp_size, num_rows, frame.local_len)
    source, row = intervals.expand(rows.begin, rows.end - rows.begin)
    table[rows.rank[source], row - rows.begin[source] + rows.start[source]] = row
    return table
