"""Slice tables with static sizes: the solver's runs padded to a `TableSpec`."""

import numpy as np

from magi_jax.masks import AttnMask, bands
from magi_jax.plan.spec import TableSpec
from magi_jax.plan.tables import SliceTable
from magi_jax.solver import slice_table as solver
from magi_jax.solver.slice_table import TileRuns


def slice_table(
    mask: AttnMask, *, tile_size: int = solver.TILE_SIZE, spec: TableSpec | None = None
) -> SliceTable:
    """The table of a whole mask on one device, int32 NumPy leaves without a leading axis.

    Args:
        mask: an `AttnMask`.
        tile_size: rows of a tile.
        spec: sizes to pad to; None takes the mask's own, rounded up to buckets.

    Raises:
        ValueError: ``spec`` is too small or of another kind; the first such size is named.
    """
    rows = mask.slices
    table = build_table(rows, np.zeros(len(rows), np.int64), 1, mask.q_len, mask.k_len, tile_size)
    table = pad_table(table, exact_spec(table).rounded() if spec is None else spec)
    return SliceTable(
        table.slices[0],
        TileRuns(*(leaf[0] for leaf in table.by_query)),
        TileRuns(*(leaf[0] for leaf in table.by_key)),
        table.q_len,
        table.k_len,
        table.tile_size,
    )


def build_table(
    slices: np.ndarray,
    part: np.ndarray,
    num_parts: int,
    q_len: int,
    k_len: int,
    tile_size: int,
    engine: str = "numpy",
) -> SliceTable:
    """Tables of ``P`` parts at once, leaves ``[P, ...]``, padded only to the longest part.

    Args:
        slices: tight visible slices ``[A, 6]`` in the coordinates of their part.
        part: part of each slice ``[A]``, rising.
        num_parts: ``P``.
        q_len: rows of the query buffer of each part.
        k_len: rows of the key buffer of each part, padding included: a tile that ends in padding
            must not be taken for one whose rows all see something.
        tile_size: rows of a tile.
        engine: "numpy" or "compiled"; both build the same.
    """
    tile_runs = solver.ENGINES[engine]
    return SliceTable(
        solver.split_by_part(slices, part, num_parts),
        tile_runs(slices, part, num_parts, q_len, tile_size),
        tile_runs(bands.transpose(slices), part, num_parts, k_len, tile_size),
        q_len,
        k_len,
        tile_size,
    )


def exact_spec(table: SliceTable) -> TableSpec:
    """Sizes of a table as it is."""
    leaves = (
        table.slices,
        table.by_query.runs,
        table.by_query.ids,
        table.by_key.runs,
        table.by_key.ids,
    )
    return TableSpec(table.q_len, table.k_len, table.tile_size, *(leaf.shape[1] for leaf in leaves))


def pad_table(table: SliceTable, spec: TableSpec) -> SliceTable:
    """Pads the leaves ``[P, ...]`` of a table to the capacities of ``spec``.

    Raises:
        ValueError: ``spec`` does not cover the table; the first size that is too small is named.
    """
    if problem := spec.shortfall(exact_spec(table)):
        raise ValueError(f"the slice table does not fit the given spec: {problem}")
    if spec.k_len != table.k_len:
        raise ValueError(
            f"the table was built for {table.k_len} keys, the spec is for {spec.k_len}"
        )
    return SliceTable(
        pad_entries(table.slices, spec.slices),
        _pad_runs(table.by_query, spec.query_runs, spec.query_ids),
        _pad_runs(table.by_key, spec.key_runs, spec.key_ids),
        spec.q_len,
        spec.k_len,
        spec.tile_size,
    )


def pad_entries(leaf: np.ndarray, size: int, fill: int | np.ndarray = 0) -> np.ndarray:
    """Appends ``fill`` along axis 1 up to ``size`` entries; int32."""
    out = np.empty((leaf.shape[0], size, *leaf.shape[2:]), np.int32)
    out[:, : leaf.shape[1]] = leaf
    out[:, leaf.shape[1] :] = fill
    return out


def _pad_runs(runs: TileRuns, num_runs: int, num_ids: int) -> TileRuns:
    return runs._replace(runs=pad_entries(runs.runs, num_runs), ids=pad_entries(runs.ids, num_ids))
