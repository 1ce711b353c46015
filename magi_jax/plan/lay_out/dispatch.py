"""Lays out where tokens live, and how they get there."""

import numpy as np

from magi_jax.plan.comm_spec import CommSpec
from magi_jax.plan.frame import Frame, does_not_fit
from magi_jax.plan.lay_out.transfer import comm_meta
from magi_jax.plan.sizes import MIN_SEGMENTS, bucket
from magi_jax.plan.slice_table import pad_entries
from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.tables import CommMeta, DispatchMeta
from magi_jax.solver.dispatch import Layout
from magi_jax.solver.slice_table import split_by_part, write_ranges
from magi_jax.solver.work import transfer


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


def _positions(layout: Layout, local_len: int, engine: str) -> np.ndarray:
    """Global position of each local row, -1 = padding, int32 ``[cp, local_len]``."""
    positions = np.empty((layout.cp_size, local_len), np.int32)
    if positions.size > layout.seq_len:
        positions[:] = -1
    begin, size = layout.edges[:-1], np.diff(layout.edges)
    write_ranges(engine, positions, layout.owner, layout.local_start, size, begin)
    return positions
