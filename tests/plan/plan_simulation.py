"""Plays a plan on the host, from its tables alone: what is where, and which cells are computed."""

import numpy as np

from magi_jax.masks import bands
from magi_jax.plan import AttentionPlan, CommMeta, CommSpec, SliceTable, TileRuns
from magi_jax.plan.tables import AnyComm


def pieces(table: np.ndarray) -> np.ndarray:
    """Pieces of one rank without padding, int64."""
    return np.asarray(table[table[:, 3] > 0], np.int64)


def cast(comm: AnyComm, rows: np.ndarray, fill: int = -1) -> np.ndarray:
    """``group_cast`` of ``rows [cp, src_rows]``, step by step; ``[cp, dst_rows]``."""
    for step in comm.steps:
        rows = cast_once(step, rows, fill)
    return rows


def cast_once(meta: CommMeta, rows: np.ndarray, fill: int = -1) -> np.ndarray:
    """One step of a cast, checked from both sides."""
    cp_size = len(rows)
    pushed = np.full((cp_size, meta.dst_rows), fill, rows.dtype)
    written = np.zeros((cp_size, meta.dst_rows), np.int64)
    blocks = np.zeros((cp_size, cp_size, max(meta.pair_rows, meta.self_rows)), np.int64)
    for rank in range(cp_size):
        for peer, src_row, dst_row, n_rows, slot in pieces(meta.send[rank]):
            assert peer in group_of(meta.spec, rank)
            assert 0 <= src_row <= meta.src_rows - n_rows
            assert 0 <= dst_row <= meta.dst_rows - n_rows
            assert slot + n_rows <= (meta.self_rows if peer == rank else meta.pair_rows)
            blocks[rank, peer, slot : slot + n_rows] += 1
            written[peer, dst_row : dst_row + n_rows] += 1
            pushed[peer, dst_row : dst_row + n_rows] = rows[rank, src_row : src_row + n_rows]
    assert written.max(initial=0) <= 1, "a row is written twice"
    assert blocks.max(initial=0) <= 1, "two pieces share a slot"
    pulled = np.full_like(pushed, fill)
    for rank in range(cp_size):
        for peer, src_row, dst_row, n_rows, _ in pieces(meta.recv[rank]):
            pulled[rank, dst_row : dst_row + n_rows] = rows[peer, src_row : src_row + n_rows]
    np.testing.assert_array_equal(pushed, pulled)
    sends = {(r, *p) for r in range(cp_size) for p in pieces(meta.send[r]).tolist()}
    recvs = {(p[0], r, *p[1:]) for r in range(cp_size) for p in pieces(meta.recv[r]).tolist()}
    assert sends == recvs
    check_order(meta)
    return pushed


def group_of(spec: CommSpec, rank: int) -> range:
    """Ranks that a rank may exchange rows with, itself included."""
    first = rank - rank // spec.stride % spec.num_peers * spec.stride
    return range(first, first + spec.num_peers * spec.stride, spec.stride)


def check_order(meta: CommMeta) -> None:
    """Both tables are sorted as promised, padding included."""
    send, recv = np.asarray(meta.send, np.int64), np.asarray(meta.recv, np.int64)
    assert (np.diff(send[:, :, 0] * 2**32 + send[:, :, 4], axis=1) >= 0).all()
    assert (np.diff(recv[:, :, 2], axis=1) >= 0).all()
    for table in (send, recv):
        padding = table[table[:, :, 3] == 0]
        assert (padding == [len(send), meta.src_rows, meta.dst_rows, 0, 0]).all()


def slice_cells(table: SliceTable, rank: int) -> np.ndarray:
    """How often each local (query, key) cell is covered by the slices, int64 ``[q_len, k_len]``."""
    cells = np.zeros((table.q_len, table.k_len), np.int64)
    for row in table.slices[rank].astype(np.int64):
        queries = np.arange(row[bands.Q_START], row[bands.Q_END])
        low, high = bands.key_bounds(np.broadcast_to(row, (len(queries), 6)), queries)
        for q, a, b in zip(queries, low, high, strict=True):
            cells[q, a:b] += 1
    return cells


def walked_cells(
    runs: TileRuns, slices: np.ndarray, q_len: int, k_len: int, tile_size: int
) -> np.ndarray:
    """Cells that a kernel computes which walks the runs of one rank as the contract says."""
    cells = np.zeros((q_len, k_len), np.int64)
    assert sorted(runs.order.tolist()) == list(range(max(-(-q_len // tile_size), 1)))
    for tile in range(len(runs.order)):
        rows = slice(tile * tile_size, min((tile + 1) * tile_size, q_len))
        queries = np.arange(rows.start, rows.stop)
        reach = 0
        for begin, end, full_begin, full_end, first, last in runs.runs[
            runs.ptr[tile] : runs.ptr[tile + 1]
        ]:
            assert reach <= begin < end <= k_len, "runs overlap or fall"
            assert begin <= full_begin <= full_end <= end
            reach = end
            seen = np.zeros((len(queries), k_len), np.int64)
            for row in slices[runs.ids[first:last]].astype(np.int64):
                low, high = bands.key_bounds(np.broadcast_to(row, (len(queries), 6)), queries)
                for i, (a, b) in enumerate(zip(low, high, strict=True)):
                    seen[i, a:b] += 1
            assert (seen[:, full_begin:full_end] == 1).all(), "a full block has hidden cells"
            cells[rows, begin:end] += seen[:, begin:end]
    return cells


def computed_cells(plan: AttentionPlan, walk: bool = True, backward: bool = False) -> np.ndarray:
    """How often each global (query, key) cell is computed, int64 ``[seq_len, seq_len]``.

    Fails when a key is neither local nor received, a query neither local nor travelling, or when a
    padding row is used.
    """
    positions = np.asarray(plan.positions, np.int64)
    cells = np.zeros((plan.spec.seq_len, plan.spec.seq_len), np.int64)
    stages = plan.backward_stages if backward else plan.forward_stages
    buffers = [positions, *(cast(meta, positions) for meta in stages.comm)]
    for table, buffer in zip(stages.calc, buffers, strict=True):
        add_cells(cells, table, positions, buffer, walk)
    if plan.travel is not None:
        moved = cast(plan.travel.comm, positions)
        add_cells(cells, plan.travel.calc, moved, positions, walk)
    if stages.late is not None:
        keys = cast(stages.late.comm, positions)
        add_cells(cells, stages.late.calc, positions, keys, walk)
    return cells


def listed_positions(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Global positions of local rows ``[cp, E]``, -1 = none; no row is listed twice."""
    for listed in rows:
        assert (listed >= 0).all()
        assert len(np.unique(listed)) == len(listed)
    none = np.full(len(positions), -1)[:, None]
    listed = np.minimum(rows, positions.shape[1])
    return np.take_along_axis(np.concatenate([positions, none], axis=1), listed, axis=1)


def add_cells(
    cells: np.ndarray, table: SliceTable, queries: np.ndarray, keys: np.ndarray, walk: bool
) -> None:
    """Adds the cells of one table, whose buffers hold the given positions ``[cp, rows]``."""
    assert (table.q_len, table.k_len) == (queries.shape[1], keys.shape[1])
    for rank in range(len(queries)):
        local = slice_cells(table, rank)
        if walk:
            check_walk(table, rank, local)
        q, k = np.nonzero(local)
        assert (queries[rank, q] >= 0).all(), "a padding row is a query"
        assert (keys[rank, k] >= 0).all(), "a key is neither local nor received"
        np.add.at(cells, (queries[rank, q], keys[rank, k]), local[q, k])


def check_walk(table: SliceTable, rank: int, local: np.ndarray) -> None:
    """Both walks of one rank's table compute exactly the cells of its slices."""
    by_query = TileRuns(*(leaf[rank] for leaf in table.by_query))
    by_key = TileRuns(*(leaf[rank] for leaf in table.by_key))
    slices, size = table.slices[rank].astype(np.int64), table.tile_size
    walked = walked_cells(by_query, slices, table.q_len, table.k_len, size)
    np.testing.assert_array_equal(walked, local)
    turned = bands.transpose(slices)
    walked = walked_cells(by_key, turned, table.k_len, table.q_len, size)
    np.testing.assert_array_equal(walked.T, local)
