"""Whether a mask is the one that a plan computes, read off the plan's tables."""

from collections.abc import Callable, Iterator

import numpy as np

from magi_jax.masks import AttnMask, bands
from magi_jax.plan.tables import AnyComm, SliceTable
from magi_jax.plan.two_level import pieces_of
from magi_jax.solver import intervals

_MOST_ROWS = 1 << 21

# Sums of the numbers of a rank's first keys, by rank and how many; modulo 2^64.
Sums = Callable[[np.ndarray, np.ndarray], np.ndarray]


def first_other_query(plan, mask: AttnMask) -> int | None:
    """The first query that sees other keys under the mask than in the forward pass of a plan; None if none.

    Each key gets a random number of 64 bits, and queries are compared by the sum over the keys that they
    see: another set of keys has the same sum once in 2^64. Where the slices of all tables have more than some
    two million rows together, every third query is compared, every fifth, and so on.

    Args:
        plan: one whole plan of self-attention, with values.
        mask: at most as long as the sequence of the plan.
    """
    positions = np.asarray(plan.positions, np.int64)
    # The last of each is that of padding, whose position is -1.
    numbers = np.random.default_rng(0).integers(0, 2**64, plan.spec.seq_len + 1, np.uint64)
    seen = list(_seen(plan, positions, _sums_of(numbers[positions])))
    num_rows = sum(_rows(np.asarray(table.slices, np.int64)).sum() for table, *_ in seen)
    step = 1 + int(num_rows) // _MOST_ROWS // 2 * 2  # odd, as chunks are even
    planned, wanted = np.zeros((2, len(numbers)), np.uint64)
    for table, queries, sums in seen:
        _add(planned, np.asarray(table.slices, np.int64), queries, sums, step)
    everywhere = np.arange(plan.spec.seq_len)[None]
    _add(wanted, mask.slices[None], everywhere, _sums_of(numbers[None]), step)
    other = np.flatnonzero(planned != wanted)
    return int(other[0]) if len(other) else None


def _seen(plan, positions, own: Sums) -> Iterator[tuple[SliceTable, np.ndarray, Sums]]:
    """Each table of the forward pass with global positions ``[cp, rows]`` of its queries, and its keys."""
    stages = plan.forward_stages
    yield stages.calc[0], positions, own
    for table, comm in zip(stages.calc[1:], stages.comm, strict=True):
        yield table, positions, _sums_received(comm, own)
    if stages.late is not None:
        yield stages.late.calc, positions, _sums_received(stages.late.comm, own)
    if plan.travel is not None:
        moved = pieces_of(plan.travel.comm)
        visitors = np.full((len(positions), plan.travel.comm.dst_rows), -1, np.int64)
        piece, row = intervals.expand(moved.src_row, moved.n_rows)
        _, place = intervals.expand(moved.dst_row, moved.n_rows)
        visitors[moved.dst[piece], place] = positions[moved.src[piece], row]
        yield plan.travel.calc, visitors, own


def _sums_of(numbers: np.ndarray) -> Sums:
    """Of keys that lie in order; their numbers are ``[cp, rows]``."""
    sums = np.zeros((len(numbers), numbers.shape[1] + 1), np.uint64)
    np.cumsum(numbers, axis=1, dtype=np.uint64, out=sums[:, 1:])
    return lambda rank, count: sums[rank, count]


def _sums_received(comm: AnyComm, own: Sums) -> Sums:
    """Of the rows of received buffers, piece by piece: buffers may have many more rows than the sequence."""
    moved, size = pieces_of(comm), comm.dst_rows + 1
    start = moved.dst * size + moved.dst_row
    order = np.argsort(start)
    start, n_rows, src, src_row = (
        x[order] for x in (start, moved.n_rows, moved.src, moved.src_row)
    )
    before = own(src, src_row)
    each = own(src, src_row + n_rows) - before
    skipped = np.cumsum(each) - each - before

    def sums(rank, count):
        at = rank * size + count
        piece = np.maximum(np.searchsorted(start, at, side="right") - 1, 0)
        inside = np.clip(at - start[piece], 0, n_rows[piece])
        return skipped[piece] + own(src[piece], src_row[piece] + inside)

    return sums if len(start) else lambda rank, count: np.zeros(len(count), np.uint64)


def _rows(slices: np.ndarray) -> np.ndarray:
    return slices[..., bands.Q_END] - slices[..., bands.Q_START]


def _add(total: np.ndarray, slices: np.ndarray, queries: np.ndarray, sums: Sums, step: int) -> None:
    """Adds to the total of each query the numbers of the keys that it sees.

    Args:
        total: by global position.
        slices: ``[cp, A, 6]`` tight rows, or zeros.
        queries: global positions ``[cp, rows]``; others than each ``step``-th are left out.
        sums: of the keys.
        step: 1 for all queries.
    """
    rank, entry = np.nonzero(_rows(slices))
    slices, width = slices[rank, entry], queries.shape[1]
    chosen = np.flatnonzero(queries.reshape(-1) % step == 0)
    first, end = (
        np.searchsorted(chosen, rank * width + slices[:, column])
        for column in (bands.Q_START, bands.Q_END)
    )
    index, place = intervals.expand(first, end - first)
    rank, row = divmod(chosen[place], width)
    low, high = bands.key_bounds(slices[index], row)
    np.add.at(total, queries[rank, row], sums(rank, high) - sums(rank, low))
