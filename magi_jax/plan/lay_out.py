"""Lays the solvers' results out as tables of the sizes that a `PlanSpec` gives."""

import dataclasses
from typing import NamedTuple

import numpy as np

from magi_jax.masks import AttnMask
from magi_jax.plan.slice_table import build_table, exact_spec, pad_entries, pad_table
from magi_jax.plan.spec import (
    MIN_BUFFER_ROWS,
    MIN_SEGMENTS,
    OWN_KEYS,
    CommSpec,
    PlanSpec,
    bucket,
)
from magi_jax.plan.tables import CommMeta, DispatchMeta, SliceTable
from magi_jax.solver import remote, stages, timeline, transfer
from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.dispatch import Layout
from magi_jax.solver.slice_table import split_by_part


class Frame(NamedTuple):
    """The identities of a plan, settled before anything is solved; names as in `PlanSpec`."""

    cp_size: int
    seq_len: int
    chunk_size: int
    local_len: int
    tile_size: int
    roll_shifts: tuple[int, ...]


class Machine(NamedTuple):
    """What a plan is made for, beside its identities; fields as in `PlanConfig`."""

    engine: str = "compiled"
    ranks_per_node: int | None = None
    cost_model: CostModel = CostModel()


class Keys(NamedTuple):
    """Where keys are, if not with the queries; ``layout`` is None for all of them on every rank."""

    layout: Layout | None
    local_len: int


def frame_of(spec: PlanSpec) -> Frame:
    """The identities of a spec."""
    return Frame(*(getattr(spec, name) for name in Frame._fields))


def require_frame(spec: PlanSpec, frame: Frame) -> None:
    """Raises ValueError unless a spec has the identities of a plan; the first that differs is
    named.
    """
    for name, value in frame._asdict().items():
        if getattr(spec, name) != value:
            raise ValueError(
                f"the spec is of another kind: its {name} is {getattr(spec, name)},"
                f" the plan's is {value}"
            )


def check_mask(mask: AttnMask, seq_len: int) -> None:
    """Raises ValueError unless a mask is square and fits into the sequence."""
    if mask.q_len != mask.k_len:
        raise ValueError(
            "make_plan is for self-attention, whose queries and keys are the same tokens; the mask has"
            f" q_len={mask.q_len} and k_len={mask.k_len} (for cross-attention plan the queries' own"
            " sequence and call plan.with_mask(mask, keys=...))"
        )
    if mask.q_len > seq_len:
        raise ValueError(f"the mask has {mask.q_len} tokens, the sequence only {seq_len}")


def check_cross_mask(mask: AttnMask, q_len: int, k_len: int) -> None:
    """Raises ValueError unless a mask fits into the sequences of queries and of keys."""
    if mask.q_len > q_len or mask.k_len > k_len:
        raise ValueError(
            f"the mask has {mask.q_len} queries and {mask.k_len} keys, the sequences have only"
            f" {q_len} and {k_len}"
        )


def make_spec(
    frame: Frame, dispatched: DispatchMeta, rolls, calc, comm, keys: str = OWN_KEYS
) -> PlanSpec:
    """Reads the spec off finished tables."""
    return PlanSpec(
        **frame._asdict(),
        segments=dispatched.segments.shape[1],
        calc=tuple(exact_spec(table) for table in calc),
        comm=tuple(meta.spec for meta in comm),
        transfer=dispatched.transfer.spec,
        rolls=tuple(meta.spec for meta in rolls),
        keys=keys,
    )


def lay_out_dispatch(
    layout: Layout, frame: Frame, spec: PlanSpec | None
) -> tuple[DispatchMeta, tuple[CommMeta, ...]]:
    """Tables of where tokens live, and of the transfer and the rolls between layouts."""
    cp_size, local_len = frame.cp_size, frame.local_len
    order = np.argsort(layout.owner, kind="stable")
    rows = np.stack([layout.edges[:-1], layout.local_start, np.diff(layout.edges)], axis=1)
    segments = split_by_part(rows[order], layout.owner[order], cp_size)
    needed = segments.shape[1]
    if spec is not None and spec.segments < needed:
        raise _does_not_fit(f"spec.segments is {spec.segments}, but {needed} is needed")
    segments = pad_entries(
        segments, bucket(needed, MIN_SEGMENTS) if spec is None else spec.segments
    )

    contiguous_len = -(-frame.seq_len // cp_size)
    move = _comm_meta(
        transfer.dispatch_pieces(layout),
        CommSpec(cp_size, contiguous_len, local_len, 0, 0, 0),
        None if spec is None else spec.transfer,
        "spec.transfer",
    )
    rolls = tuple(
        _comm_meta(
            transfer.roll_pieces(layout, shift),
            CommSpec(cp_size, local_len, local_len, 0, 0, 0),
            None if spec is None else spec.rolls[i],
            f"spec.rolls[{i}]",
        )
        for i, shift in enumerate(frame.roll_shifts)
    )
    return DispatchMeta(segments, _positions(layout, frame.local_len), move), rolls


def lay_out_stages(
    slices: np.ndarray,
    layout: Layout,
    frame: Frame,
    overlap: int | str,
    spec: PlanSpec | None,
    machine: Machine,
    keys: Keys | None = None,
) -> tuple[tuple[SliceTable, ...], tuple[CommMeta, ...]]:
    """Solves what crosses ranks and what each rank computes: (``calc``, ``comm``) of a plan."""
    cut = remote.cut_queries(slices, layout)
    keys = Keys(layout, frame.local_len) if keys is None else keys
    if keys.layout is None:
        work = stages.whole_key_slices(cut)
        return _lay_out_tables([work], [keys.local_len], frame, spec, machine), ()
    far = remote.remote_ranges(cut, keys.layout)
    num_stages = _num_remote_stages(frame, overlap, spec)
    if num_stages is None:
        num_stages = _auto_num_stages(cut, far, keys.layout, frame, machine)
    if num_stages > 1:
        far = remote.split_stages(far, num_stages, frame.cp_size)
    comm = tuple(
        _comm_meta(
            transfer.stage_pieces(far, stage),
            CommSpec(frame.cp_size, keys.local_len, 0, 0, 0, 0),
            None if spec is None else spec.comm[stage],
            f"spec.comm[{stage}]",
        )
        for stage in range(num_stages)
    )
    buffers = [keys.local_len, *(meta.dst_rows for meta in comm)]
    works = stages.stage_slices(cut, far, keys.layout, num_stages)
    return _lay_out_tables(works, buffers, frame, spec, machine), comm


def _lay_out_tables(works, buffers, frame: Frame, spec: PlanSpec | None, machine: Machine):
    """Slice tables of the work of each stage; ``buffers`` has the rows of its keys."""
    calc = []
    for i, (work, k_len) in enumerate(zip(works, buffers, strict=True)):
        lengths = frame.local_len, k_len
        table = build_table(
            work.slices, work.rank, frame.cp_size, *lengths, frame.tile_size, machine.engine
        )
        needed = exact_spec(table)
        wanted = needed.rounded() if spec is None else spec.calc[i]
        if problem := wanted.shortfall(needed, f"spec.calc[{i}]"):
            raise _does_not_fit(problem)
        calc.append(pad_table(table, wanted))
    return tuple(calc)


def layout_of(dispatched: DispatchMeta, cp_size: int) -> Layout:
    """The solver's layout back from concrete dispatch tables."""
    segments = np.asarray(dispatched.segments, np.int64)
    owner, entry = np.nonzero(segments[:, :, 2])
    start, local_start, n_rows = segments[owner, entry].T
    order = np.argsort(start)
    edges = np.append(start[order], (start + n_rows).max())
    return Layout(edges, owner[order], local_start[order], cp_size)


def _auto_num_stages(cut, far, layout: Layout, frame: Frame, machine: Machine) -> int:
    """The number of equal remote stages that should take least time, forward and backward together."""
    cp_size = frame.cp_size
    pair = far.src * cp_size + far.dst
    rows = np.bincount(pair, weights=far.end - far.begin, minlength=cp_size * cp_size)
    traffic, model = rows.reshape(1, cp_size, cp_size), machine.cost_model
    per_node = machine.ranks_per_node or cp_size
    if timeline.splitting_is_vain(traffic, frame.local_len, per_node, model):
        return 1
    whole = stages.stage_slices(cut, far, layout, 1)
    works = timeline.even_stages(whole, traffic, frame.local_len, per_node, model)
    return timeline.fastest(works) + 1


def _num_remote_stages(frame, overlap, spec) -> int | None:
    """Number of remote stages; None when neither ``overlap`` nor the spec settles it."""
    if frame.cp_size == 1:
        return 0
    if overlap == "auto" and spec is None:
        return None
    if overlap != "auto" and spec is not None and overlap != spec.num_remote_stages:
        raise ValueError(
            f"overlap={overlap} is the number of remote stages, the spec has"
            f" {spec.num_remote_stages} of them"
        )
    return spec.num_remote_stages if overlap == "auto" else overlap


def _comm_meta(pieces, sizes: CommSpec, wanted: CommSpec | None, path: str) -> CommMeta:
    """Tables of one transfer; ``sizes`` gives its row counts, ``dst_rows == 0`` means as many as
    arrive.
    """
    tables = transfer.transfer_tables(pieces, sizes.cp_size)
    dst_rows = sizes.dst_rows
    if dst_rows == 0:
        dst_rows = tables.dst_rows if wanted else bucket(tables.dst_rows, MIN_BUFFER_ROWS)
    needed = CommSpec(
        sizes.cp_size,
        sizes.src_rows,
        dst_rows,
        tables.pair_rows,
        tables.self_rows,
        max(tables.send.shape[1], tables.recv.shape[1]),
    )
    spec = wanted
    if spec is None:
        spec = needed.rounded()
        most = max(spec.src_rows, 1)  # no pair shares more rows than the source has
        spec = dataclasses.replace(
            spec, pair_rows=min(spec.pair_rows, most), self_rows=min(spec.self_rows, most)
        )
    if problem := spec.shortfall(needed, path):
        raise _does_not_fit(problem)
    # Past every end, so that the tables stay sorted.
    padding = np.array([spec.cp_size, spec.src_rows, spec.dst_rows, 0, 0])
    send = _pad_pieces(tables.send, spec.pieces, padding)
    return CommMeta(send, _pad_pieces(tables.recv, spec.pieces, padding), spec)


def _pad_pieces(table: np.ndarray, size: int, padding: np.ndarray) -> np.ndarray:
    """Pads to ``size`` pieces and rewrites the solver's own padding."""
    out = pad_entries(table, size)
    out[out[:, :, 3] == 0] = padding
    return out


def _positions(layout: Layout, local_len: int) -> np.ndarray:
    """Global position of each local row, -1 = padding, int32 ``[cp, local_len]``."""
    size = np.diff(layout.edges)
    held = np.bincount(layout.owner, weights=size, minlength=layout.cp_size).astype(np.int64)
    # One stretch per segment and one for the padding of each rank, in the order of the local rows.
    rank = np.concatenate([layout.owner, np.arange(layout.cp_size)])
    order = np.lexsort((np.concatenate([layout.local_start, held]), rank))
    shift = np.concatenate([-layout.offset, np.zeros_like(held)])[order]
    rows = np.concatenate([size, local_len - held])[order]
    positions = np.repeat(shift.astype(np.int32), rows).reshape(layout.cp_size, local_len)
    positions += np.arange(local_len, dtype=np.int32)
    for short in np.flatnonzero(held < local_len):
        positions[short, held[short] :] = -1
    return positions


def _does_not_fit(problem: str) -> ValueError:
    return ValueError(f"the plan does not fit the given spec: {problem}")
