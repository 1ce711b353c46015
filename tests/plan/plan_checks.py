"""Every invariant of a plan, checked against the dense mask."""

import jax
import numpy as np
import plan_simulation as simulate

from magi_jax.masks import AttnMask
from magi_jax.plan import AttentionPlan
from magi_jax.plan.tables import StageTables


def check_plan(plan: AttentionPlan, mask: AttnMask, walk: bool = True) -> None:
    """Cells, dispatch, moves and volume of a plan; ``walk`` also walks the tables as kernels do."""
    seq_len = plan.spec.seq_len
    for leaf in jax.tree.leaves(plan):
        assert leaf.dtype == np.int32
        assert leaf.shape[0] == plan.cp_size
    expected = np.zeros((seq_len, seq_len), np.int64)
    expected[: mask.q_len, : mask.k_len] = mask.dense()
    np.testing.assert_array_equal(simulate.computed_cells(plan, walk), expected)
    if plan.backward is not None:
        cells = simulate.computed_cells(plan, walk, backward=True)
        np.testing.assert_array_equal(cells, expected)
    check_dispatch(plan)
    check_moves(plan)
    moved = check_travel(plan, expected)
    home = expected.copy()
    home[moved] = 0
    for stages in (plan.forward_stages, plan.backward_stages):
        late = check_late(plan, stages, home)
        early = home.copy()
        early[late] = 0
        check_no_redundancy(plan, stages.comm, early)
    check_report(plan, expected, home)


def check_dispatch(plan: AttentionPlan) -> None:
    """Positions permute the tokens, in global order per rank, and segments agree with them."""
    positions = np.asarray(plan.positions)
    assert sorted(positions[positions >= 0].tolist()) == list(range(plan.spec.seq_len))
    rebuilt = np.full_like(positions, -1)
    for rank, segments in enumerate(plan.dispatch.segments):
        for start, local_start, n_rows in segments:
            rebuilt[rank, local_start : local_start + n_rows] = np.arange(start, start + n_rows)
    np.testing.assert_array_equal(rebuilt, positions)
    counts = (positions >= 0).sum(axis=1)
    assert counts.max() - counts.min() <= plan.spec.chunk_size
    for row, count in zip(positions, counts, strict=True):
        assert (np.diff(row[:count]) > 0).all()
        assert (row[count:] == -1).all()


def check_moves(plan: AttentionPlan) -> None:
    """The transfer and the rolls bring each row where its position says."""
    positions = np.asarray(plan.positions)
    seq_len = plan.spec.seq_len
    per_rank = -(-seq_len // plan.cp_size)
    assert plan.dispatch.transfer.src_rows == per_rank
    contiguous = np.arange(plan.cp_size * per_rank).reshape(plan.cp_size, per_rank)
    contiguous = np.where(contiguous < seq_len, contiguous, -1)
    moved = simulate.cast(plan.dispatch.transfer, contiguous)
    np.testing.assert_array_equal(moved, positions)
    for shift, meta in zip(plan.spec.roll_shifts, plan.rolls, strict=True):
        wanted = positions - shift
        wanted = np.where((positions < 0) | (wanted < 0) | (wanted >= seq_len), -1, wanted)
        np.testing.assert_array_equal(simulate.cast(meta, positions), wanted)


def check_travel(plan: AttentionPlan, expected: np.ndarray) -> np.ndarray:
    """Each rank receives exactly the travelling queries of others that see its keys; returns which
    travel, sorted.
    """
    if plan.travel is None:
        return np.zeros(0, np.int64)
    positions = np.asarray(plan.positions)
    received = simulate.cast(plan.travel.comm, positions)
    assert plan.spec.ranks_per_node or plan.travel.comm.self_rows == 0
    moved = np.unique(received[received >= 0])
    for rank in range(plan.cp_size):
        own = positions[rank][positions[rank] >= 0]
        seen = expected[:, own].any(axis=1)
        seen[own] = False
        size = int((received[rank] >= 0).sum())
        needed = np.intersect1d(np.flatnonzero(seen), moved)
        np.testing.assert_array_equal(received[rank, :size], needed)
    return moved


def check_late(plan: AttentionPlan, stages: StageTables, expected: np.ndarray) -> np.ndarray:
    """Each rank receives exactly the keys that its late queries see, its own too; returns which queries
    are late. In the backward pass also what others see of these keys is theirs.
    """
    if stages.late is None:
        return np.zeros(0, np.int64)
    positions = np.asarray(plan.positions)
    received = simulate.cast(stages.late.comm, positions)
    calc = stages.late.calc
    is_late = np.repeat(np.diff(calc.by_query.ptr) > 0, calc.tile_size, axis=1)[:, : calc.q_len]
    np.testing.assert_array_equal(stages.late.num_rows, is_late.sum(axis=1))
    queries = [rows[mine & (rows >= 0)] for rows, mine in zip(positions, is_late, strict=True)]
    if stages.late.shared is not None:
        check_shared(stages, positions, received)
        return np.concatenate(queries)
    for late, keys in zip(queries, received, strict=True):
        size = int((keys >= 0).sum())
        np.testing.assert_array_equal(keys[:size], np.flatnonzero(expected[late].any(axis=0)))
    return np.concatenate(queries)


def check_shared(stages: StageTables, positions: np.ndarray, received: np.ndarray) -> None:
    """The gradients of all received keys come together at their owners, and stage 0 has no part of them."""
    shared = stages.late.shared
    own = simulate.listed_positions(shared.rows, positions)
    np.testing.assert_array_equal(simulate.cast(shared.comm, own), received)
    np.testing.assert_array_equal(np.unique(own[own >= 0]), np.unique(received[received >= 0]))
    for rank, rows in enumerate(shared.rows):
        cells = simulate.slice_cells(stages.calc[0], rank)
        assert not cells[:, rows[rows < cells.shape[1]]].any()


def check_no_redundancy(plan: AttentionPlan, comm, expected: np.ndarray) -> None:
    """Each rank receives exactly the distinct keys that its queries see and it does not own; stages are
    even, or empty at the end: in one step those of a rank, in two those of a node, whose rows enter it once,
    and those of rows that it has.
    """
    positions = np.asarray(plan.positions)
    received = [simulate.cast(meta, positions) for meta in comm]
    per_node = plan.spec.ranks_per_node
    if per_node is None:
        assert all(meta.self_rows == 0 for meta in comm)
    for first in range(0, plan.cp_size, per_node or 1):
        node = range(first, first + (per_node or 1))
        kinds = [
            len(meta.steps) for meta in comm
        ]  # rows of own nodes take one step beside those of others
        for kind in set(kinds):
            alike = [rows for rows, of in zip(received, kinds, strict=True) if of == kind]
            sizes = [len(np.setdiff1d(rows[node], -1)) for rows in alike]
            used = [size for size in sizes if size]
            assert not used or max(used) - min(used) <= 1
        crossing = [simulate.cast_once(meta.steps[0], positions)[node] for meta in comm]
        held = np.setdiff1d(positions[node], -1)
        entered = np.concatenate([np.zeros(0, np.int64), *(x[x >= 0] for x in crossing)])
        entered = entered[~np.isin(entered, held)]
        assert len(np.unique(entered)) == len(entered)
    for rank in range(plan.cp_size):
        own = positions[rank][positions[rank] >= 0]
        needed = np.setdiff1d(np.flatnonzero(expected[own].any(axis=0)), own)
        got = np.concatenate([rows[rank] for rows in received]) if received else own[:0]
        # In global order in each stage, and packed at the front of each buffer.
        np.testing.assert_array_equal(np.sort(got[got >= 0]), needed)
        sizes = [int((rows[rank] >= 0).sum()) for rows in received]
        for rows, size in zip(received, sizes, strict=True):
            assert (rows[rank, :size] >= 0).all()
            assert (np.diff(rows[rank, :size]) > 0).all()


def check_report(plan: AttentionPlan, expected: np.ndarray, home: np.ndarray) -> None:
    """The report's counts are those of the dense mask; ``home`` has only queries that stay."""
    report = plan.report()
    owned = [row[row >= 0] for row in np.asarray(plan.positions)]
    needed = [np.setdiff1d(np.flatnonzero(home[own].any(0)), own) for own in owned]
    for rank, own in enumerate(owned):
        away = np.setdiff1d(np.arange(len(expected)), own)
        travelled = (expected - home)[np.ix_(away, own)].sum()
        local = home[own].sum() + (expected - home)[np.ix_(own, own)].sum()
        assert report.tokens[rank] == len(own)
        assert report.area[:, rank].sum() == local
        assert report.travel_area[rank] == travelled
        assert report.recv_rows[rank] == needed[rank].size
        assert report.send_rows[rank] == sum(np.isin(own, rows).sum() for rows in needed)
    assert report.rank_area.sum() == expected.sum()
    assert report.redundancy == 1.0
    assert "imbalance" in str(report)
    assert ("travelling" in str(report)) == bool(report.travel_area.any())
