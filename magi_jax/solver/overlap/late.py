"""Late queries: those that need keys of other ranks wait until all their keys are there, and are then
computed in one call, own keys included.

Where few rows need remote keys this spares what stages cost every row: partial results in float32, merged
and converted afterwards. Whole tiles of query rows are late; the keys that they see, those of the rank too,
come into one buffer.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.cost import schedule, timeline
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.dispatch.layout import Layout
from magi_jax.solver.overlap.stage_times import all_link_rows
from magi_jax.solver.work.find_work import Work, traffic
from magi_jax.solver.work.remote import NOTHING_REMOTE, QueryCut, Remote, remote_ranges
from magi_jax.solver.work.stages import Staged, StageSlices, cut_stages

# With more late rows than this share of a rank's, the others hide too little of their fetch as a rule.
MOST_LATE = 0.5


class RankRows(NamedTuple):
    """Local rows of each rank, as if gathered into a buffer: intervals ``[n]``, sorted by (rank, begin) and
    disjoint.

    Attributes:
        rank: whose rows.
        begin, end: local rows.
        start: first row in the buffer.
        held: ``[cp]`` rows of each rank's buffer.
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
        slices: what late queries see: local rows of queries, and of the buffer of their keys.
        shared: own keys whose whole gradient comes back from the buffers of late queries, and from there
            alone; None where it is to be added to what stage 0 gives.
    """

    home: Staged
    rows: RankRows
    keys: Remote
    slices: StageSlices
    shared: RankRows | None = None


def predict_us(late: LateWork, machine: Machine, engine: str = "numpy") -> tuple[float, float]:
    """Predicted time of each direction; compare with `overlap.Choice.each_us`.

    Own keys are copied into the buffer beside those that come, in a fraction of their time; their gradients
    take the way of all. No row is merged.
    """
    cp_size, model = len(late.rows.held), machine.cost_model
    moved, per_node = traffic(late.keys, 1, cp_size), machine.node_of(cp_size)
    reduced = timeline.link_rows(moved, per_node)
    cast = timeline.link_rows(moved * ~np.eye(cp_size, dtype=bool), per_node)
    shapes = timeline.shapes_of([*late.home.slices, late.slices], cp_size, model, engine)
    forward, backward = (
        timeline.direction_work(shapes, cast, False, model, way) for way in (False, True)
    )
    backward = backward._replace(reduce_us=model.reduce_us(*reduced))
    return schedule.simulate(forward).predicted_us, schedule.simulate(backward).predicted_us


def largest_share(work: Work, stages: int, machine: Machine, local_len: int) -> float:
    """Share of a rank's rows that may be late: all where merging so many ``stages`` takes at least half as
    long as to bring every key of other ranks, which on such a rank nothing hides. The busiest link may be
    that of a rank with other rows.
    """
    model = machine.cost_model
    near, far = all_link_rows(work, machine)
    wait_us = float(model.cast_us(near, far).max(initial=0.0))
    return 1.0 if wait_us < 2 * stages * model.merge_us(local_len, backward=False) else MOST_LATE


def find_late(work: Work, rows: RankRows, local_len: int) -> LateWork:
    """The work with these rows late.

    Args:
        work: what the layout asks for, without travelling queries.
        rows: as `late_rows` finds them.
        local_len: query rows of each rank.
    """
    assert work.travel is None, "the own keys of a travelling query are in stage 0"
    home, late = _split_queries(work.cut, rows, local_len)
    return _late_work(work, home, late, rows)


def find_late_gradients(work: Work, forward: LateWork, tile_size: int, local_len: int) -> LateWork:
    """The backward pass of the same. What other queries of a rank see of keys that late queries see too moves
    to the late call, so that all of a key's gradient comes from one place, and stage 0 writes that of
    other keys once and for all.

    Args:
        work: what the layout asks for.
        forward: late queries of the forward pass.
        tile_size: rows of a query tile.
        local_len: query rows of each rank.
    """
    cp_size, sent = work.layout.cp_size, forward.keys
    early, late = _split_queries(work.cut, forward.rows, local_len)
    home, moved = _split_keys(early, _rank_rows(sent.src, sent.begin, sent.end, cp_size))
    begin = (moved.slices[:, bands.Q_START] + moved.q_offset) // tile_size * tile_size
    end = -(-(moved.slices[:, bands.Q_END] + moved.q_offset) // tile_size) * tile_size
    rows = _rank_rows(
        np.concatenate([forward.rows.rank, moved.rank]),
        np.concatenate([forward.rows.begin, begin]),
        np.concatenate([forward.rows.end, np.minimum(end, local_len)]),
        cp_size,
    )
    both = QueryCut(*map(np.concatenate, zip(late, moved, strict=True)))
    order = np.argsort(both.rank, kind="stable")
    found = _late_work(work, home, QueryCut(*(part[order] for part in both)), rows)
    sent = found.keys
    end_row = sent.src_row + sent.end - sent.begin
    return found._replace(shared=_rank_rows(sent.src, sent.src_row, end_row, cp_size))


def _late_work(work: Work, home: QueryCut, late: QueryCut, rows: RankRows) -> LateWork:
    """Work whose late slices, those of local ``rows``, are ``late``."""
    owners = work.keys.layout
    assert owners is not None, "nobody waits for keys that are everywhere"
    keys = remote_ranges(late, owners, with_own=True)
    # Nobody owns keys here: all that these queries see is received.
    none = np.zeros(0, np.int64)
    nobody = Layout(np.array([owners.seq_len]), none, none, owners.cp_size)
    slices = cut_stages(late, keys, nobody, 1, engine=work.engine).slices[1]
    return LateWork(work._replace(cut=home, far=NOTHING_REMOTE).staged(0), rows, keys, slices)


def late_rows(staged: Staged, cp_size: int, tile_size: int, local_len: int) -> RankRows:
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
    return _rank_rows(rank, begin, end, cp_size)


def _rank_rows(rank: np.ndarray, begin: np.ndarray, end: np.ndarray, cp_size: int) -> RankRows:
    rank, begin, end = intervals.union(rank, begin, end)
    size = end - begin
    held = np.bincount(rank, size, cp_size).astype(np.int64)
    return RankRows(rank, begin, end, intervals.offsets(rank, size, cp_size), held)


def _split_queries(cut: QueryCut, rows: RankRows, local_len: int) -> tuple[QueryCut, QueryCut]:
    """Slices of all other queries, and of those in local ``rows``."""
    base = cut.rank * local_len + cut.q_offset
    columns = (bands.Q_START, bands.Q_END)
    return _split(cut, base, columns, rows, local_len)


def _split_keys(cut: QueryCut, keys: RankRows) -> tuple[QueryCut, QueryCut]:
    """Slices with all other keys, and with those that a rank has in ``keys``, by place in the sequence."""
    span = int(max(keys.end.max(initial=0), cut.slices[:, bands.K_END].max(initial=0)))
    return _split(cut, cut.rank * span, (bands.K_START, bands.K_END), keys, span)


def _split(cut, base, columns, rows, span) -> tuple[QueryCut, QueryCut]:
    """What of a cut lies outside of ``rows`` and inside, where ``base`` takes the positions in ``columns`` to
    one axis on which each rank has ``span`` places.
    """
    if not len(rows.rank):
        return cut, QueryCut(*(part[:0] for part in cut))
    first, last = cut.slices[:, columns[0]] + base, cut.slices[:, columns[1]] + base
    begin, end = rows.rank * span + rows.begin, rows.rank * span + rows.end
    gaps = np.append(0, end), np.append(begin, len(rows.held) * span)
    filled = gaps[0] < gaps[1]
    names = ("q_start", "q_end") if columns[0] == bands.Q_START else ("k_start", "k_end")

    def inside(begin, end) -> QueryCut:
        source, part = intervals.meet(first, last, begin, end)
        pieces = cut.slices[source]
        cuts = np.flatnonzero((first[source] < begin[part]) | (last[source] > end[part]))
        limits = (each[part[cuts]] - base[source[cuts]] for each in (begin, end))
        pieces[cuts] = bands.clip(pieces[cuts], **dict(zip(names, limits, strict=True)))
        seen = bands.is_visible(pieces)
        if not seen.all():
            pieces, source = pieces[seen], source[seen]
        return QueryCut(pieces, cut.rank[source], cut.q_offset[source])

    return inside(gaps[0][filled], gaps[1][filled]), inside(begin, end)
