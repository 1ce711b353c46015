"""The table that attention kernels read: which slices each tile of rows meets, in the order of its
walk.

Kernels own tiles of ``tile_size`` consecutive rows (query rows in the forward pass, key rows for dK
and dV). For each tile the table lists *runs*: maximal intervals of the other axis that the tile has
to walk, with the slices that decide visibility there and the longest sub-interval in which every
row of the tile sees everything, so that blocks inside it need no mask. Runs do not depend on a
kernel's block size.

Everything is vectorised over ``parts`` (one table per rank and stage), so that one pass serves all
ranks.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.engine import compiled

TILE_SIZE = 128

RUN_BEGIN, RUN_END, FULL_BEGIN, FULL_END, IDS_BEGIN, IDS_END = range(6)


Rounding = Callable[[int], int]


class TileRuns(NamedTuple):
    """Walk of every tile along the other axis, for ``P`` parts with ``M`` tiles each, int32.

    Attributes:
        ptr: ``[P, M + 1]``; runs of tile ``m`` are ``runs[ptr[m]:ptr[m + 1]]``, in rising order.
        runs: ``[P, R, 6]``; ``begin, end`` (interval of the other axis), ``full_begin, full_end``
            (the part of it that all rows of the tile see entirely; empty is ``begin, begin``),
            ``ids_begin, ids_end`` (its slices in ``ids``).
        ids: ``[P, I]``; rows of the slice array, ordered by where they begin on the other axis.
        order: ``[P, M]``; tiles by decreasing work, for persistent grids.
    """

    ptr: np.ndarray
    runs: np.ndarray
    ids: np.ndarray
    order: np.ndarray


def tile_runs(
    slices: np.ndarray,
    part: np.ndarray,
    num_parts: int,
    length: int,
    tile_size: int = TILE_SIZE,
    round_runs: Rounding | None = None,
    round_ids: Rounding | None = None,
) -> TileRuns:
    """Builds the walk of query tiles; give transposed slices for key tiles.

    Args:
        slices: tight visible slices ``[A, 6]`` in the coordinates of their part, int64.
        part: part of each slice ``[A]``, rising.
        num_parts: number of parts ``P``.
        length: rows of the tiled axis.
        tile_size: rows per tile.
        round_runs: takes the most runs of a part to the capacity ``R``; None leaves it as it is.
        round_ids: the same for ``I``.
    """
    num_tiles = max(-(-length // tile_size), 1)
    pair_slice, pair_tile = _touching_pairs(slices, tile_size)
    cut = bands.clip(
        slices[pair_slice], q_start=pair_tile * tile_size, q_end=(pair_tile + 1) * tile_size
    )
    tile = part[pair_slice] * num_tiles + pair_tile
    order = np.lexsort((cut[:, bands.K_START], tile))
    cut, tile, pair_slice = cut[order], tile[order], pair_slice[order]

    begin, end = cut[:, bands.K_START], cut[:, bands.K_END]
    starts_run = intervals.starts_union(tile, begin, end)
    run_first = np.flatnonzero(starts_run)
    run_tile = tile[run_first]
    run_end = np.maximum.reduceat(end, run_first) if len(run_first) else end[:0]
    full_begin, full_end = _full_interval(cut, tile, starts_run, length, num_tiles, tile_size)

    slice_base = np.searchsorted(part, np.arange(num_parts))
    id_base = np.searchsorted(tile, np.arange(num_parts) * num_tiles)
    run_part = run_tile // num_tiles
    ids_begin = run_first - id_base[run_part]
    ids_end = np.append(run_first[1:], len(tile)) - id_base[run_part]
    runs = np.stack([begin[run_first], run_end, full_begin, full_end, ids_begin, ids_end], axis=1)
    run_ptr = np.searchsorted(run_tile, np.arange(num_parts * num_tiles + 1))

    work = np.bincount(tile, weights=bands.area(cut), minlength=num_parts * num_tiles)
    first_run = run_ptr[:-1:num_tiles][:num_parts]
    ptr = np.concatenate(
        [run_ptr[:-1].reshape(num_parts, num_tiles), run_ptr[num_tiles::num_tiles, None]], axis=1
    )
    return TileRuns(
        ptr=(ptr - first_run[:, None]).astype(np.int32),
        runs=_padded(runs, run_part, num_parts, round_runs),
        ids=_padded(
            pair_slice - slice_base[part[pair_slice]], tile // num_tiles, num_parts, round_ids
        ),
        order=np.argsort(-work.reshape(num_parts, num_tiles), axis=1, kind="stable").astype(
            np.int32
        ),
    )


def compiled_tile_runs(
    slices: np.ndarray,
    part: np.ndarray,
    num_parts: int,
    length: int,
    tile_size: int = TILE_SIZE,
    round_runs: Rounding | None = None,
    round_ids: Rounding | None = None,
) -> TileRuns:
    """`tile_runs` by the compiled planner: the same, about ten times as fast.

    Raises:
        ImportError: the extension module is not built.
    """
    walk = compiled().walk_tiles(slices, part, num_parts, length, tile_size, round_runs, round_ids)
    return _tile_runs(*walk)


def _tile_runs(ptr: np.ndarray, runs: np.ndarray, ids: np.ndarray, order: np.ndarray) -> TileRuns:
    """What the compiled planner gives, whose ids are a table of one column."""
    return TileRuns(ptr, runs, ids[..., 0], order)


# Slices ``[P, A, 6]`` and the walks of query and of key tiles.
Tables = tuple[np.ndarray, TileRuns, TileRuns]


def slice_tables(
    slices: np.ndarray,
    part: np.ndarray,
    num_parts: int,
    q_len: int,
    k_len: int,
    tile_size: int,
    rooms: Sequence[Rounding],
) -> Tables:
    """Padded slices of all parts, and both walks.

    Args:
        slices: tight visible slices ``[A, 6]`` in the coordinates of their part.
        part: part of each slice ``[A]``, rising.
        num_parts: number of parts ``P``.
        q_len: rows of the query buffer.
        k_len: rows of the key buffer.
        tile_size: rows per tile.
        rooms: take the most of a part to the capacity: of slices, of runs and ids of the walk of query tiles,
            and of those of the other.
    """
    most = int(np.bincount(part, minlength=1).max())
    return (
        split_by_part(slices, part, num_parts, rooms[0](most)),
        tile_runs(slices, part, num_parts, q_len, tile_size, *rooms[1:3]),
        tile_runs(bands.transpose(slices), part, num_parts, k_len, tile_size, *rooms[3:5]),
    )


def compiled_slice_tables(
    slices: np.ndarray,
    part: np.ndarray,
    num_parts: int,
    q_len: int,
    k_len: int,
    tile_size: int,
    rooms: Sequence[Rounding],
) -> Tables:
    """`slice_tables` by the compiled planner.

    Raises:
        ImportError: the extension module is not built.
    """
    padded, *walks = compiled().slice_table(slices, part, num_parts, q_len, k_len, tile_size, rooms)
    by_query, by_key = (_tile_runs(*walk) for walk in walks)
    return padded, by_query, by_key


def _padded(rows, part, num_parts: int, rounding: Rounding | None) -> np.ndarray:
    most = int(np.bincount(part, minlength=1).max())
    return split_by_part(rows, part, num_parts, most if rounding is None else rounding(most))


ENGINES = MappingProxyType({"numpy": tile_runs, "compiled": compiled_tile_runs})
TABLES = MappingProxyType({"numpy": slice_tables, "compiled": compiled_slice_tables})


def split_parts(
    engine: str, rows: np.ndarray, part: np.ndarray, num_parts: int, size: int, fill: np.ndarray
) -> np.ndarray:
    """`split_by_part` of rows ``[N, W]``, by either engine."""
    if engine == "numpy":
        return split_by_part(rows, part, num_parts, size, fill)
    return compiled().split_by_part(rows, part, num_parts, size, fill)


def write_ranges(
    engine: str,
    table: np.ndarray,
    rank: np.ndarray,
    at: np.ndarray,
    count: np.ndarray,
    first: np.ndarray,
) -> None:
    """Writes ``table[rank, at + i] = first + i`` for ``i < count``, for each of the ranges ``[E]``, into an
    int32 table ``[cp, L]``, by either engine.
    """
    if engine == "compiled":
        compiled().write_ranges(table, rank, at, count, first)
        return
    source, row = intervals.expand(first, count)
    table[rank[source], row - first[source] + at[source]] = row


def _touching_pairs(slices: np.ndarray, tile_size: int) -> tuple[np.ndarray, np.ndarray]:
    """All (slice, tile) pairs that share a row."""
    first = slices[:, bands.Q_START] // tile_size
    last = (slices[:, bands.Q_END] - 1) // tile_size
    return intervals.expand(first, last - first + 1)


def _full_interval(cut, tile, starts_run, length, num_tiles, tile_size):
    """Longest interval of each run in which all rows of the tile see all keys, merging abutting
    slices.
    """
    tile_start = tile % num_tiles * tile_size
    tile_end = np.minimum(tile_start + tile_size, length)
    covers = (cut[:, bands.Q_START] == tile_start) & (cut[:, bands.Q_END] == tile_end)
    low = np.maximum(cut[:, bands.K_START], tile_end - 1 + cut[:, bands.D_MIN])
    high = np.minimum(cut[:, bands.K_END], tile_start + cut[:, bands.D_MAX] + 1)
    full = np.flatnonzero(covers & (low < high))
    run = np.cumsum(starts_run) - 1
    first_begin = cut[starts_run, bands.K_START]
    full_begin, full_end = first_begin.copy(), first_begin.copy()
    if len(full):
        full = full[np.lexsort((low[full], run[full]))]
        run, low, high = run[full], low[full], high[full]
        joined = np.flatnonzero(intervals.starts_union(run, low, high))
        begin, end, owner = low[joined], np.maximum.reduceat(high, joined), run[joined]
        by_length = np.argsort(end - begin, kind="stable")  # a later, longer interval overwrites
        full_begin[owner[by_length]] = begin[by_length]
        full_end[owner[by_length]] = end[by_length]
    return full_begin, full_end


def split_by_part(
    rows: np.ndarray, part: np.ndarray, num_parts: int, size: int | None = None, fill=0
) -> np.ndarray:
    """Stacks the rows of each part and pads them; ``[P, L, ...]`` int32.

    Args:
        rows: ``[N, ...]``.
        part: part of each row ``[N]``, rising.
        num_parts: ``P``.
        size: ``L``, or the length of the longest part where that is more.
        fill: what padding rows hold.
    """
    count = np.bincount(part, minlength=num_parts)
    most = int(count.max(initial=0))
    size = most if size is None else max(size, most)
    out = np.empty((num_parts, size, *rows.shape[1:]), np.int32)
    out[:] = fill
    within = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    out[part, within] = rows
    return out
