"""Late queries: those that need keys of other ranks wait until all their keys are there, and are then
computed in one call, own keys included.

Where few rows need remote keys this spares what stages cost every row: partial results in float32, merged
and converted afterwards. Whole tiles of query rows are late; the rank gathers them into a small buffer, and
the keys that they see, its own too, come into another.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals, timeline
from magi_jax.solver.dispatch import Layout
from magi_jax.solver.overlap import Machine
from magi_jax.solver.remote import NOTHING_REMOTE, QueryCut, Remote, remote_ranges
from magi_jax.solver.stages import Staged, StageSlices, stage_slices
from magi_jax.solver.work import Work, traffic

# With more late rows than this share of a rank's, the others would hide too little of their fetch.
MOST_LATE = 0.5


class LateRows(NamedTuple):
    """Intervals of local query rows that are late, ``[n]`` each, sorted by (rank, begin) and disjoint.

    Attributes:
        rank: whose rows.
        begin, end: local rows.
        start: first row in the buffer of the rank's late rows.
        held: ``[cp]`` late rows of each rank.
    """

    rank: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    start: np.ndarray
    held: np.ndarray


class LateWork(NamedTuple):
    """One direction's work with late queries instead of remote stages.

    Attributes:
        home: stage 0 alone: all other queries, which see own keys only.
        rows: which queries are late.
        keys: ranges that fill the buffer of their keys, own ones (``src == dst``) included.
        slices: what late queries see: queries are rows of their buffer, keys rows of theirs.
    """

    home: Staged
    rows: LateRows
    keys: Remote
    slices: StageSlices


def predict_us(late: LateWork, machine: Machine) -> float:
    """Predicted time of both directions; compare with `overlap.Choice.predicted_us`.

    What the merging of a stage costs every row, late queries cost for being gathered and put back.
    """
    cp_size, model = len(late.rows.held), machine.cost_model
    moved = traffic(late.keys, 1, cp_size) * ~np.eye(cp_size, dtype=bool)
    rows = timeline.link_rows(moved, machine.node_of(cp_size))
    shapes = timeline.shapes_of([*late.home.slices, late.slices], cp_size, model)
    num_rows = int(late.rows.held.max())
    works = (
        timeline.direction_work(shapes, rows, num_rows, model, backward)
        for backward in (False, True)
    )
    return sum(timeline.simulate(work).predicted_us for work in works)


def find_late(work: Work, rows: LateRows, local_len: int) -> LateWork:
    """The work with these rows late.

    Args:
        work: what the layout asks for, without travelling queries.
        rows: as `late_rows` finds them.
        local_len: query rows of each rank.
    """
    assert work.travel is None, "the own keys of a travelling query are in stage 0"
    owners = work.keys.layout
    assert owners is not None, "nobody waits for keys that are everywhere"
    home, late = _split(work.cut, rows, local_len)
    keys = remote_ranges(late, owners, with_own=True)
    # Nobody owns keys here: all that these queries see is received.
    none = np.zeros(0, np.int64)
    nobody = Layout(np.array([owners.seq_len]), none, none, owners.cp_size)
    slices = stage_slices(late, keys, nobody, 1)[1]
    return LateWork(work._replace(cut=home, far=NOTHING_REMOTE).staged(0), rows, keys, slices)


def late_rows(staged: Staged, cp_size: int, tile_size: int, local_len: int) -> LateRows:
    """Rows of the tiles in which a query sees a key of another rank.

    Args:
        staged: the work in any number of remote stages but 0.
        cp_size: number of ranks.
        tile_size: rows of a query tile.
        local_len: query rows of each rank.
    """
    slices = np.concatenate([stage.slices for stage in staged.slices[1:]])
    rank = np.concatenate([stage.rank for stage in staged.slices[1:]])
    begin = slices[:, bands.Q_START] // tile_size * tile_size
    end = np.minimum(-(-slices[:, bands.Q_END] // tile_size) * tile_size, local_len)
    rank, begin, end = intervals.union(rank, begin, end)
    size = end - begin
    held = np.bincount(rank, size, cp_size).astype(np.int64)
    return LateRows(rank, begin, end, intervals.offsets(rank, size, cp_size), held)


def _split(cut: QueryCut, rows: LateRows, local_len: int) -> tuple[QueryCut, QueryCut]:
    """Slices of all other queries, and of late ones, whose ``q_offset`` leads into their buffer."""
    # All ranks' local rows on one axis.
    base = cut.rank * local_len + cut.q_offset
    begin, end = rows.rank * local_len + rows.begin, rows.rank * local_len + rows.end
    others = np.append(0, end), np.append(begin, len(rows.held) * local_len)
    filled = others[0] < others[1]
    other = _pieces(cut, base, others[0][filled], others[1][filled], np.zeros(filled.sum(), int))
    return other, _pieces(cut, base, begin, end, rows.start - rows.begin)


def _pieces(cut, base, begin, end, shift) -> QueryCut:
    source, part = intervals.meet(
        cut.slices[:, bands.Q_START] + base, cut.slices[:, bands.Q_END] + base, begin, end
    )
    pieces = bands.clip(
        cut.slices[source], q_start=begin[part] - base[source], q_end=end[part] - base[source]
    )
    seen = bands.is_visible(pieces)
    offset = cut.q_offset[source] + shift[part]
    return QueryCut(pieces[seen], cut.rank[source][seen], offset[seen])
