"""Lays late queries out: the cast of their keys, and their slice table."""

import dataclasses

import numpy as np

from magi_jax.plan.comm_spec import CommSpec
from magi_jax.plan.frame import Frame, does_not_fit
from magi_jax.plan.lay_out.transfer import comm_meta, empty_comm, padding_piece
from magi_jax.plan.part_specs import LateSpec
from magi_jax.plan.sizes import MIN_BUFFER_ROWS, bucket
from magi_jax.plan.slice_table import build_table, empty_table
from magi_jax.plan.tables import N_ROWS, PEER, SRC_ROW, CommMeta, LateTables, SharedTables
from magi_jax.solver.overlap.late import LateWork, RankRows
from magi_jax.solver.slice_table import write_ranges
from magi_jax.solver.work import transfer
from magi_jax.solver.work.find_work import Keys


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
    calc = build_table(
        late.slices.slices, np.asarray(late.slices.rank, np.int64), frame.cp_size, frame.local_len,
        comm.dst_rows, frame.tile_size, engine, None if wanted is None else wanted.calc, f"{path}.calc",
    )  # fmt: skip
    shared = None
    if late.shared is not None:
        size = bucket(int(late.shared.held.max(initial=0)), MIN_BUFFER_ROWS)
        if wanted is not None and wanted.shared_rows is not None:
            if size > wanted.shared_rows:
                size = int(late.shared.held.max())
            if size > wanted.shared_rows:
                raise does_not_fit(
                    f"{path}.shared_rows is {wanted.shared_rows}, but {size} is needed"
                )
            size = wanted.shared_rows
        shared = _shared_tables(late.shared, comm, size, engine)
    return LateTables(comm, calc, shared)


def _shared_tables(shared: RankRows, comm: CommMeta, num_rows: int, engine: str) -> SharedTables:
    """The same pieces, but at their owners rows of a buffer of shared keys."""
    cp_size, span = comm.spec.cp_size, comm.src_rows
    first = shared.rank * span + shared.begin
    moved = shared.start - shared.begin
    spec = dataclasses.replace(comm.spec, src_rows=num_rows)

    def in_buffer(table: np.ndarray, owner: np.ndarray) -> np.ndarray:
        table = np.array(table)
        held = table[:, :, N_ROWS] > 0
        place = (owner * span + table[:, :, SRC_ROW])[held]
        part = np.searchsorted(first, place, side="right") - 1
        table[:, :, SRC_ROW][held] += moved[part].astype(np.int32)
        table[~held] = padding_piece(spec)
        return table

    ranks = np.broadcast_to(np.arange(cp_size)[:, None], comm.send.shape[:2])
    send = in_buffer(comm.send, ranks)
    recv = in_buffer(comm.recv, np.asarray(comm.recv[:, :, PEER], np.int64))
    return SharedTables(_row_table(shared, num_rows, span, engine), CommMeta(send, recv, spec))


def empty_late(spec: LateSpec) -> LateTables:
    """Tables of a plan in which no query is late."""
    cp_size = spec.comm.cp_size
    shared = None
    if spec.shared_rows is not None:
        nothing = no_rows(cp_size, spec.shared_rows, spec.comm.src_rows)
        shared = SharedTables(nothing, empty_comm(spec.shared_comm))
    return LateTables(empty_comm(spec.comm), empty_table(spec.calc, cp_size), shared)


def no_rows(cp_size: int, num_rows: int, local_len: int) -> np.ndarray:
    """Rows of a buffer of shared keys that hold none: past the end, and no two of them the same."""
    rows = local_len + np.arange(num_rows, dtype=np.int32)
    return np.broadcast_to(rows, (cp_size, num_rows)).copy()


def _row_table(rows: RankRows, num_rows: int, local_len: int, engine: str) -> np.ndarray:
    table = no_rows(len(rows.held), num_rows, local_len)
    write_ranges(engine, table, rows.rank, rows.start, rows.end - rows.begin, rows.begin)
    return table
