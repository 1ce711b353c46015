"""Lays out one transfer in one step."""

import dataclasses

import numpy as np

from magi_jax.plan.comm_spec import CommSpec
from magi_jax.plan.frame import does_not_fit
from magi_jax.plan.sizes import MIN_BUFFER_ROWS, bucket
from magi_jax.plan.tables import CommMeta
from magi_jax.solver.slice_table import split_parts
from magi_jax.solver.work import transfer


def comm_meta(
    pieces: transfer.Pieces, sizes: CommSpec, wanted: CommSpec | None, path: str, engine: str
) -> CommMeta:
    """Tables of one transfer.

    Args:
        pieces: what moves.
        sizes: gives ranks and row counts; ``dst_rows == 0`` means as many as arrive.
        wanted: sizes to lay out in; None takes those needed, rounded up.
        path: what to call ``wanted`` in errors.
        engine: what sorts the pieces.

    Raises:
        ValueError: ``wanted`` is too small or of another kind.
    """
    tables = transfer.transfer_tables(pieces, sizes.cp_size, engine)
    dst_rows = sizes.dst_rows
    if dst_rows == 0:
        dst_rows = tables.dst_rows if wanted else bucket(tables.dst_rows, MIN_BUFFER_ROWS)
    counts = (np.bincount(x, minlength=1).max() for x in (tables.send_rank, tables.recv_rank))
    needed = dataclasses.replace(
        sizes,
        dst_rows=dst_rows,
        pair_rows=tables.pair_rows,
        self_rows=tables.self_rows,
        pieces=int(max(counts)),
    )
    if wanted is None:
        spec = needed.rounded()
        most = max(spec.src_rows, 1)  # no pair shares more rows than the source has
        spec = dataclasses.replace(
            spec, pair_rows=min(spec.pair_rows, most), self_rows=min(spec.self_rows, most)
        )
    else:
        spec = wanted
        if problem := spec.shortfall(needed, path):
            raise does_not_fit(problem)
    shape = spec.cp_size, spec.pieces, padding_piece(spec)
    send = split_parts(engine, tables.send, tables.send_rank, *shape)
    recv = split_parts(engine, tables.recv, tables.recv_rank, *shape)
    return CommMeta(send, recv, spec)


def padding_piece(spec: CommSpec) -> np.ndarray:
    """What follows the pieces of a table: past every end, so that the tables stay sorted."""
    return np.array([spec.cp_size, spec.src_rows, spec.dst_rows, 0, 0])


def empty_comm(spec: CommSpec) -> CommMeta:
    """A transfer of no row."""
    table = np.empty((spec.cp_size, spec.pieces, 5), np.int32)
    table[:] = padding_piece(spec)
    return CommMeta(table, table.copy(), spec)
