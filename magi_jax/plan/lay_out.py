"""Lays transfers and the dispatch out as tables of the sizes that a `PlanSpec` gives."""

import dataclasses

import numpy as np

from magi_jax.plan.comm_spec import CommSpec
from magi_jax.plan.frame import Frame, does_not_fit
from magi_jax.plan.sizes import MIN_BUFFER_ROWS, MIN_SEGMENTS, bucket
from magi_jax.plan.slice_table import pad_entries
from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.tables import CommMeta, DispatchMeta
from magi_jax.solver import transfer
from magi_jax.solver.dispatch import Layout
from magi_jax.solver.slice_table import split_by_part, split_parts, write_ranges


def lay_out_dispatch(
    layout: Layout, frame: Frame, spec: PlanSpec | None, engine: str
) -> tuple[DispatchMeta, tuple[CommMeta, ...]]:
    """Tables of where tokens live, and of the transfer and the rolls between layouts."""
    cp_size, local_len = frame.cp_size, frame.local_len
    order = np.argsort(layout.owner, kind="stable")
    rows = np.stack([layout.edges[:-1], layout.local_start, np.diff(layout.edges)], axis=1)
    segments = split_by_part(rows[order], layout.owner[order], cp_size)
    needed = segments.shape[1]
    if spec is not None and spec.segments < needed:
        raise does_not_fit(f"spec.segments is {spec.segments}, but {needed} is needed")
    segments = pad_entries(
        segments, bucket(needed, MIN_SEGMENTS) if spec is None else spec.segments
    )

    contiguous_len = -(-frame.seq_len // cp_size)
    move = comm_meta(
        transfer.dispatch_pieces(layout),
        CommSpec(cp_size, contiguous_len, local_len, 0, 0, 0),
        None if spec is None else spec.transfer,
        "spec.transfer",
        engine,
    )
    rolls = tuple(
        comm_meta(
            transfer.roll_pieces(layout, shift),
            CommSpec(cp_size, local_len, local_len, 0, 0, 0),
            None if spec is None else spec.rolls[i],
            f"spec.rolls[{i}]",
            engine,
        )
        for i, shift in enumerate(frame.roll_shifts)
    )
    return DispatchMeta(segments, _positions(layout, frame.local_len, engine), move), rolls


def layout_of(dispatched: DispatchMeta, cp_size: int) -> Layout:
    """The solver's layout back from concrete dispatch tables."""
    segments = np.asarray(dispatched.segments, np.int64)
    owner, entry = np.nonzero(segments[:, :, 2])
    start, local_start, n_rows = segments[owner, entry].T
    order = np.argsort(start)
    edges = np.append(start[order], (start + n_rows).max())
    return Layout(edges, owner[order], local_start[order], cp_size)


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


def _positions(layout: Layout, local_len: int, engine: str) -> np.ndarray:
    """Global position of each local row, -1 = padding, int32 ``[cp, local_len]``."""
    positions = np.full((layout.cp_size, local_len), -1, np.int32)
    begin, size = layout.edges[:-1], np.diff(layout.edges)
    write_ranges(engine, positions, layout.owner, layout.local_start, size, begin)
    return positions
