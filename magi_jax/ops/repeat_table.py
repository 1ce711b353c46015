"""The slice table of a batch whose sequences share one, from the shared table, on the device."""

from typing import Any

import jax.numpy as jnp

from magi_jax.masks import bands
from magi_jax.plan import SliceTable
from magi_jax.solver.slice_table import FULL_END, IDS_BEGIN, IDS_END, TileRuns


def can_repeat(table: SliceTable) -> bool:
    """Whether tiles of a packed batch are those of its sequences: no tile holds rows of two."""
    return table.q_len % table.tile_size == 0 and table.k_len % table.tile_size == 0


def repeat_table(table: SliceTable, count: int) -> SliceTable:
    """The table of ``count`` sequences one after the other, each under the mask of ``table``.

    Args:
        table: for one sequence; its arrays may be traced. `can_repeat` holds for it.
        count: number of sequences, at least 1.
    """
    slices = jnp.asarray(table.slices)
    place = jnp.arange(count, dtype=jnp.int32)[:, None, None]
    offset = jnp.zeros(bands.NUM_COLUMNS, jnp.int32)
    offset = offset.at[bands.Q_START : bands.K_START].set(table.q_len)
    offset = offset.at[bands.K_START : bands.D_MIN].set(table.k_len)
    offset = offset.at[bands.D_MIN :].set(table.k_len - table.q_len)
    return SliceTable(
        slices=(slices[None] + place * offset[None, None]).reshape(-1, bands.NUM_COLUMNS),
        by_query=_repeat_walk(table.by_query, count, len(slices), table.k_len),
        by_key=_repeat_walk(table.by_key, count, len(slices), table.q_len),
        q_len=count * table.q_len,
        k_len=count * table.k_len,
        tile_size=table.tile_size,
    )


def _repeat_walk(walk: TileRuns, count: int, num_slices: int, walk_len: int) -> TileRuns:
    """Runs and ids of each sequence behind those of the one before, without the padding between."""
    ptr, runs, ids, order = map(jnp.asarray, walk)
    num_tiles, num_runs = len(order), ptr[-1]
    used = jnp.arange(len(runs)) < num_runs
    num_ids = jnp.max(jnp.where(used, runs[:, IDS_END], 0), initial=0)

    # Past the last sequence entries repeat and are never read.
    place, entry = jnp.divmod(jnp.arange(count * len(runs)), jnp.maximum(num_runs, 1))
    place = jnp.minimum(place, count - 1)
    columns = jnp.arange(runs.shape[1])
    step = jnp.where(columns <= FULL_END, walk_len, 0)
    step = jnp.where((columns == IDS_BEGIN) | (columns == IDS_END), num_ids, step)
    all_runs = runs[entry] + place[:, None] * step[None]

    of, entry = jnp.divmod(jnp.arange(count * len(ids)), jnp.maximum(num_ids, 1))
    all_ids = ids[entry] + jnp.minimum(of, count - 1) * num_slices
    starts = ptr[None, :-1] + jnp.arange(count)[:, None] * num_runs
    all_ptr = jnp.append(starts.ravel(), count * num_runs)
    all_order: Any = (order[:, None] + jnp.arange(count)[None] * num_tiles).ravel()
    parts: Any = (x.astype(jnp.int32) for x in (all_ptr, all_runs, all_ids, all_order))
    return TileRuns(*parts)
