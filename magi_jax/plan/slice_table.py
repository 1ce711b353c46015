"""Slice tables with static sizes: the solver's runs padded to a `TableSpec`."""

import numpy as np

from magi_jax.masks import bands
from magi_jax.masks.attn_mask import AttnMask, require_mask
from magi_jax.plan.frame import does_not_fit
from magi_jax.plan.part_specs import TableSpec
from magi_jax.plan.sizes import MIN_ENTRIES, bucket
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
        spec: sizes to pad to, such as the `SliceTable.spec` of several tables united, so that a jitted
            function is compiled once for all of them; None takes the mask's own, rounded up to buckets.

    Raises:
        TypeError: ``mask`` or ``spec`` is of another kind.
        ValueError: ``spec`` is too small; the first such size is named.
    """
    require_mask(mask)
    if spec is not None and not isinstance(spec, TableSpec):
        raise TypeError(
            f"spec must be a TableSpec, such as slice_table(other_mask).spec, or None; got"
            f" {type(spec).__name__}"
        )
    part = np.zeros(mask.num_slices, np.int64)
    sizes = (mask.q_len, mask.k_len, tile_size)
    table = build_table(mask.slices, part, 1, *sizes, "numpy", spec)
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
    spec: TableSpec | None = None,
    path: str = "spec",
) -> SliceTable:
    """Tables of ``P`` parts at once, leaves ``[P, ...]``.

    Args:
        slices: tight visible slices ``[A, 6]`` in the coordinates of their part.
        part: part of each slice ``[A]``, rising.
        num_parts: ``P``.
        q_len: rows of the query buffer of each part, padding included: a tile that ends in padding must
            not be taken for one whose rows all see something.
        k_len: rows of the key buffer, likewise.
        tile_size: rows of a tile.
        engine: "numpy" or "compiled"; both build the same.
        spec: sizes to lay out in; None takes those needed, rounded up to buckets.
        path: what to call ``spec`` in errors.

    Raises:
        ValueError: ``spec`` is too small or of another kind; the first such size is named.
    """

    def room(name: str):
        if spec is None:
            return lambda needed: bucket(needed, MIN_ENTRIES)
        return lambda needed: max(needed, getattr(spec, name))

    rooms = tuple(map(room, ("slices", "query_runs", "query_ids", "key_runs", "key_ids")))
    sizes = q_len, k_len, tile_size
    table = SliceTable(*solver.TABLES[engine](slices, part, num_parts, *sizes, rooms), *sizes)
    if spec is not None and (problem := spec.shortfall(table.spec, path)):
        raise does_not_fit(problem)
    if spec is not None and (q_len, k_len) != (spec.q_len, spec.k_len):
        raise does_not_fit(
            f"{path} is for {spec.q_len} queries and {spec.k_len} keys, the table has {q_len} and"
            f" {k_len}"
        )
    return table


def empty_table(spec: TableSpec, num_parts: int) -> SliceTable:
    """Tables of ``num_parts`` parts in which no query sees a key."""
    none = np.zeros((0, bands.NUM_COLUMNS), np.int64), np.zeros(0, np.int64)
    return build_table(*none, num_parts, spec.q_len, spec.k_len, spec.tile_size, "numpy", spec)


def pad_entries(leaf: np.ndarray, size: int, fill: int | np.ndarray = 0) -> np.ndarray:
    """Appends ``fill`` along axis 1 up to ``size`` entries; int32."""
    out = np.empty((leaf.shape[0], size, *leaf.shape[2:]), np.int32)
    out[:, : leaf.shape[1]] = leaf
    out[:, leaf.shape[1] :] = fill
    return out
