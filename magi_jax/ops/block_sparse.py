"""Slice tables of block masks that are known on the device only, built there with static sizes.

For sparse-training research: a program chooses key blocks for every query block (the top ones by some
score), builds the table in the same jit, and hands it to `flex_flash_attention`. Everything has as many
entries as the shapes allow at most, so no choice of blocks can overflow a table.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from magi_jax.plan import SliceTable
from magi_jax.solver.slice_table import TILE_SIZE, TileRuns


class _Axis(NamedTuple):
    """One side of the mask: ``length`` rows in blocks of ``block`` rows; the last may be short."""

    length: int
    block: int

    @property
    def num_blocks(self) -> int:
        return -(-self.length // self.block)

    def starts(self) -> jax.Array:
        return jnp.arange(self.num_blocks, dtype=jnp.int32) * self.block

    def ends(self) -> jax.Array:
        return jnp.minimum(self.starts() + self.block, self.length)


def block_sparse_table(
    blocks: jax.Array,
    block_size: int | tuple[int, int],
    q_len: int,
    k_len: int | None = None,
    *,
    causal: bool = False,
    tile_size: int = TILE_SIZE,
) -> SliceTable:
    """The table of a mask of whole blocks, from device arrays, inside jit or outside.

    The sizes of the table follow from the shapes alone: about ``QB * X`` slices of 24 bytes, where ``X``
    is the number of blocks that a query block may see. Give the chosen blocks as indices where they are
    few. While it is built, several int32 arrays of ``QB * KB`` elements are in memory.

    Args:
        blocks: which key blocks each query block sees: bool ``[QB, KB]``; or integer indices
            ``[QB, X]``, in any order, in which -1 (any number outside ``[0, KB)``) chooses nothing and
            repetitions count once. ``QB = ceil(q_len / q_block)``, ``KB = ceil(k_len / k_block)``.
        block_size: rows of a block, of queries and of keys; one integer stands for both. Multiples of
            ``tile_size`` make the shortest walks.
        q_len: number of queries T.
        k_len: number of keys S; None is ``q_len``.
        causal: hide keys after the query (aligned top-left) inside the chosen blocks.
        tile_size: rows of a tile.

    Returns:
        A table for `flex_flash_attention`.

    Raises:
        ValueError: ``blocks`` has another shape or dtype, or a size is not positive.
    """
    q_block, k_block = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    k_len = q_len if k_len is None else k_len
    if min(q_block, k_block, q_len, k_len, tile_size) < 1:
        raise ValueError(
            f"lengths, block sizes and tile size must be positive; got {q_len=} {k_len=}"
            f" {block_size=} {tile_size=}"
        )
    queries, keys = _Axis(q_len, q_block), _Axis(k_len, k_block)
    visible, per_row = _visible_blocks(jnp.asarray(blocks), queries, keys)
    if causal:
        visible &= keys.starts()[None, :] < queries.ends()[:, None]
    capacity = queries.num_blocks * per_row
    ids = jnp.cumsum(visible.ravel(), dtype=jnp.int32).reshape(visible.shape) - 1
    return SliceTable(
        slices=_slices(visible, queries, keys, capacity, causal),
        by_query=_walk(visible, ids, queries, keys, capacity, tile_size, (causal, False)),
        by_key=_walk(visible.T, ids.T, keys, queries, capacity, tile_size, (False, causal)),
        q_len=q_len,
        k_len=k_len,
        tile_size=tile_size,
    )


def _visible_blocks(blocks: jax.Array, queries: _Axis, keys: _Axis) -> tuple[jax.Array, int]:
    """Bool ``[QB, KB]``, and how many a row can have at most."""
    shape = (queries.num_blocks, keys.num_blocks)
    is_index = jnp.issubdtype(blocks.dtype, jnp.integer)
    if blocks.ndim != 2 or blocks.shape[0] != shape[0] or not (is_index or blocks.dtype == bool):
        raise ValueError(
            f"blocks must be bool {list(shape)} or integer [{shape[0]}, X]; got {blocks.dtype}"
            f" {list(blocks.shape)}"
        )
    if not is_index:
        if blocks.shape != shape:
            raise ValueError(f"blocks must be bool {list(shape)}, got {list(blocks.shape)}")
        return blocks, shape[1]
    # A narrow type may not hold the number of blocks, and a wide one not fit int32.
    if blocks.dtype.itemsize > 4:
        blocks = jnp.clip(blocks, -1, shape[1])
    chosen = blocks.astype(jnp.int32)
    # Indices below zero would count from the end.
    chosen = jnp.where(chosen < 0, shape[1], chosen)
    rows = jnp.arange(shape[0])[:, None]
    visible = jnp.zeros(shape, bool).at[rows, chosen].set(True, mode="drop")
    return visible, min(blocks.shape[1], shape[1])


def _slices(visible, queries: _Axis, keys: _Axis, capacity: int, causal: bool) -> jax.Array:
    """A tight slice for each visible block, ``[capacity, 6]`` in the order of the blocks."""
    q, k = jnp.nonzero(visible, size=capacity, fill_value=0)
    q0, q1 = queries.starts()[q], queries.ends()[q]
    k0, k1 = keys.starts()[k], keys.ends()[k]
    if causal:
        q0, k1 = jnp.maximum(q0, k0), jnp.minimum(k1, q1)
    d_min, d_max = k0 - (q1 - 1), k1 - 1 - q0
    if causal:
        d_max = jnp.minimum(d_max, 0)
    rows = jnp.stack([q0, q1, k0, k1, d_min, d_max], axis=1).astype(jnp.int32)
    present = jnp.arange(capacity) < jnp.sum(visible)
    return jnp.where(present[:, None], rows, 0)


def _walk(
    visible: jax.Array,
    ids: jax.Array,
    rows: _Axis,
    columns: _Axis,
    capacity: int,
    tile_size: int,
    cut: tuple[bool, bool],
) -> TileRuns:
    """Walk of tiles of ``rows`` along ``columns``.

    Args:
        visible: ``[row blocks, column blocks]``.
        ids: slice of each visible block.
        rows: the tiled axis.
        columns: the axis that is walked.
        capacity: most visible blocks.
        tile_size: rows of a tile.
        cut: whether a tile sees no column past its last row (queries of a causal mask), and whether
            none before its first row (keys of one).
    """
    num_tiles = -(-rows.length // tile_size)
    tile_begin = jnp.arange(num_tiles, dtype=jnp.int32) * tile_size
    tile_end = jnp.minimum(tile_begin + tile_size, rows.length)
    # Row blocks that a tile can touch: [M, D], those past its end are repeated and do not count.
    depth = min(_most_met(tile_size, rows.block), rows.num_blocks)
    block = tile_begin[:, None] // rows.block + jnp.arange(depth)[None]
    touches = block * rows.block < tile_end[:, None]
    block = jnp.minimum(block, rows.num_blocks - 1)
    begin = jnp.broadcast_to(columns.starts(), (num_tiles, columns.num_blocks))
    end = jnp.broadcast_to(columns.ends(), begin.shape)
    if cut[0]:
        end = jnp.minimum(end, tile_end[:, None])
    if cut[1]:
        begin = jnp.maximum(begin, tile_begin[:, None])
    seen = visible[block] & touches[:, :, None] & (begin < end)[:, None, :]  # [M, D, C]
    any_row = jnp.any(seen, axis=1)
    whole = jnp.all(seen | ~touches[:, :, None], axis=1) & any_row
    # Where the diagonal passes, some row of the tile lacks a column.
    if cut[0]:
        whole &= columns.ends()[None] - 1 <= tile_begin[:, None]
    if cut[1]:
        whole &= columns.starts()[None] >= tile_end[:, None] - 1
    # A row block of a visible pair meets so many tiles.
    tiles_of_block = min(_most_met(rows.block, tile_size), num_tiles)
    num_ids = min(capacity * tiles_of_block, num_tiles * depth * columns.num_blocks)
    num_runs = min(num_ids, num_tiles * -(-columns.num_blocks // 2))
    order: Any = jnp.argsort(-jnp.sum(jnp.where(any_row, end - begin, 0), axis=1))
    ptr, runs = _runs(any_row, whole, begin, end, seen.sum(1, dtype=jnp.int32), num_runs)
    return TileRuns(
        ptr,
        runs,
        ids=_listed_ids(seen, ids[block], num_ids),
        order=order.astype(jnp.int32),
    )


def _most_met(size: int, other: int) -> int:
    """Most pieces of ``other`` rows that one of ``size`` rows meets; both are cut from row 0 on."""
    if other % size == 0 or size % other == 0:
        return max(size // other, 1)
    return -(-(size - 1) // other) + 1


def _listed_ids(seen: jax.Array, ids: jax.Array, num_ids: int) -> Any:
    """Slices of every tile in the order of its walk, ``[num_ids]``."""
    # Blocks of one column begin together, so any order among them will do.
    seen, ids = (jnp.swapaxes(x, 1, 2).ravel() for x in (seen, ids))
    (place,) = jnp.nonzero(seen, size=num_ids, fill_value=0)
    return ids[place].astype(jnp.int32)


def _runs(
    any_row: jax.Array,
    whole: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    count: jax.Array,
    num_runs: int,
) -> Any:
    """``ptr [M + 1]`` and ``runs [num_runs, 6]``: neighbouring columns that a tile sees are one run."""
    column = jnp.arange(any_row.shape[1], dtype=jnp.int32)
    before = jnp.pad(any_row, ((0, 0), (1, 0)))[:, :-1]
    first = any_row & ~before
    last = any_row & ~jnp.pad(any_row, ((0, 0), (0, 1)))[:, 1:]
    ptr = jnp.pad(jnp.cumsum(first.sum(1)), (1, 0)).astype(jnp.int32)
    head = jnp.nonzero(first.ravel(), size=num_runs, fill_value=0)[0]
    tail = jnp.nonzero(last.ravel(), size=num_runs, fill_value=0)[0]
    # The longest stretch of columns that all rows see, of each run, by where it ends.
    broken = jax.lax.cummax(jnp.where(whole, -1, column[None]), axis=1)
    length = jnp.where(whole, column[None] - broken, 0)
    run = jnp.cumsum(first.ravel()) - 1
    best = jnp.zeros(num_runs, jnp.int32).at[run].max(length.ravel(), mode="drop")
    is_best = whole.ravel() & (length.ravel() == best[jnp.clip(run, 0, num_runs - 1)])
    stop = (
        jnp.zeros(num_runs, jnp.int32)
        .at[run]
        .max(jnp.where(is_best, jnp.arange(run.size, dtype=jnp.int32), 0), mode="drop")
    )
    start = stop - jnp.maximum(best - 1, 0)
    run_begin, run_end = begin.ravel()[head], end.ravel()[tail]
    full_begin = jnp.where(best > 0, begin.ravel()[start], run_begin)
    full_end = jnp.where(best > 0, end.ravel()[stop], run_begin)
    listed = jnp.cumsum(count.ravel())
    ids_end = listed[tail]
    ids_begin = listed[head] - count.ravel()[head]
    runs = jnp.stack([run_begin, run_end, full_begin, full_end, ids_begin, ids_end], axis=1)
    present = jnp.arange(num_runs) < ptr[-1]
    return ptr, jnp.where(present[:, None], runs, 0).astype(jnp.int32)
