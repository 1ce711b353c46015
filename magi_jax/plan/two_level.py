"""Transfers of plans as tables: in one step, or in two that cross between nodes once for each row."""

import dataclasses

import numpy as np

from magi_jax.plan.comm_spec import AnyCommSpec, CommSpec, TwoLevelSpec
from magi_jax.plan.lay_out.transfer import comm_meta, empty_comm
from magi_jax.plan.tables import DST_ROW, N_ROWS, PEER, SRC_ROW, AnyComm, CommMeta, TwoLevelComm
from magi_jax.solver.work import two_level
from magi_jax.solver.work.transfer import Pieces


def lay_out_transfer(
    pieces: Pieces,
    sizes: CommSpec,
    wanted: AnyCommSpec | None,
    path: str,
    engine: str,
    ranks_per_node: int | None,
    is_near: bool = False,
) -> AnyComm:
    """Tables of a transfer that may take two steps.

    Args:
        pieces: what moves.
        sizes: gives the row counts; ``dst_rows == 0`` means as many as arrive.
        wanted: sizes to lay out in, which settle the number of steps; None takes those needed.
        path: what to call ``wanted`` in errors.
        engine: what sorts the pieces.
        ranks_per_node: of a transfer in two steps; None for one step.
        is_near: whether all rows stay inside nodes, so that one step is enough, if ``wanted`` has no two.

    Raises:
        ValueError: ``wanted`` is too small or of another kind.
    """
    if isinstance(wanted, CommSpec):
        sizes = dataclasses.replace(sizes, peers=wanted.peers, stride=wanted.stride)
        return comm_meta(pieces, sizes, wanted, path, engine)
    if wanted is None and (ranks_per_node is None or is_near):
        sizes = dataclasses.replace(sizes, peers=ranks_per_node or 0)
        return comm_meta(pieces, sizes, None, path, engine)
    per_node = ranks_per_node if wanted is None else wanted.ranks_per_node
    assert per_node is not None
    steps = two_level.split(pieces, per_node, sizes.cp_size, engine)
    across = dataclasses.replace(
        sizes, dst_rows=0, peers=sizes.cp_size // per_node, stride=per_node
    )
    size = None if wanted is None else wanted.across
    first = comm_meta(steps.across, across, size, f"{path}.across", engine)
    within = dataclasses.replace(sizes, src_rows=first.dst_rows, peers=per_node, stride=1)
    size = None if wanted is None else wanted.within
    second = comm_meta(steps.within, within, size, f"{path}.within", engine)
    return TwoLevelComm(first, second, per_node)


def empty_transfer(spec: AnyCommSpec) -> AnyComm:
    """A transfer of no row."""
    if isinstance(spec, CommSpec):
        return empty_comm(spec)
    return TwoLevelComm(empty_comm(spec.across), empty_comm(spec.within), spec.ranks_per_node)


def in_two_steps(
    comm: CommMeta, ranks_per_node: int, wanted: TwoLevelSpec | None = None
) -> TwoLevelComm:
    """Splits a concrete transfer with leaves ``[cp, L, 5]`` in two steps of the same effect.

    Raises:
        ValueError: nodes do not divide the ranks, or ``wanted`` is too small.
    """
    spec = comm.spec
    if ranks_per_node < 1 or spec.cp_size % ranks_per_node:
        raise ValueError(
            f"{spec.cp_size} ranks are not whole nodes of {ranks_per_node}: ranks_per_node must"
            " divide them"
        )
    dst_rows = spec.dst_rows if wanted is None else wanted.dst_rows
    sizes = CommSpec(spec.cp_size, spec.src_rows, dst_rows, 0, 0, 0)
    split = lay_out_transfer(pieces_of(comm), sizes, wanted, "spec", "numpy", ranks_per_node)
    assert isinstance(split, TwoLevelComm)
    return split


def pieces_of(comm: AnyComm) -> Pieces:
    """What a concrete transfer moves from owners to receivers, whatever its steps."""
    if isinstance(comm, TwoLevelComm):
        return two_level.joined(two_level.TwoSteps(*map(pieces_of, comm.steps)))
    table = np.asarray(comm.send)
    src, index = np.nonzero(table[..., N_ROWS] > 0)
    found = table[src, index].astype(np.int64)
    return Pieces(src, found[:, PEER], found[:, SRC_ROW], found[:, DST_ROW], found[:, N_ROWS])


def rows_between(comm: AnyComm) -> np.ndarray:
    """Rows that a concrete transfer brings from each rank (first axis) to each other, int64 ``[cp, cp]``,
    whatever its steps.
    """
    pieces, size = pieces_of(comm), comm.spec.cp_size
    counts = np.bincount(pieces.src * size + pieces.dst, pieces.n_rows, size * size)
    return counts.reshape(size, size).astype(np.int64)


def rows_on_links(comm: AnyComm) -> np.ndarray:
    """Rows that a concrete transfer moves over the link from each rank to each other, int64 ``[cp, cp]``:
    those of all steps, without what a rank copies to itself.
    """
    moved = np.sum([rows_between(step) for step in comm.steps], axis=0)
    np.fill_diagonal(moved, 0)
    return moved
