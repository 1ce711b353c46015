"""What a rank computes in one step, as slices in the coordinates of its queries and of a buffer of keys."""

from typing import NamedTuple

import jax
import numpy as np

from magi_jax.masks import AttnMask, bands
from magi_jax.plan.slice_table import build_table
from magi_jax.plan.tables import SliceTable
from magi_jax.solver import intervals
from magi_jax.solver.dispatch import Layout
from magi_jax.solver.work import remote


class Cells(NamedTuple):
    """Slices of many steps: ``slices [A, 6]`` in local coordinates of step ``part [A]``, rising."""

    slices: np.ndarray
    part: np.ndarray


def by_owner(mask: AttnMask, layout: Layout) -> Cells:
    """Queries of rank ``r`` against the keys of rank ``s``, part ``r * ranks + s``, local rows both."""
    cut = remote.cut_queries(mask.slices, layout)
    source, segment = intervals.meet(
        cut.slices[:, bands.K_START],
        cut.slices[:, bands.K_END],
        layout.edges[:-1],
        layout.edges[1:],
    )
    pieces = bands.clip(
        cut.slices[source], k_start=layout.edges[segment], k_end=layout.edges[segment + 1]
    )
    pieces = bands.shift(pieces, cut.q_offset[source], layout.offset[segment])
    part = cut.rank[source] * layout.cp_size + layout.owner[segment]
    return sorted_cells(pieces, part)


def all_keys(mask: AttnMask, layout: Layout) -> Cells:
    """Queries of rank ``r``, local rows, against all keys in global order, part ``r``."""
    cut = remote.cut_queries(mask.slices, layout)
    return sorted_cells(bands.shift(cut.slices, cut.q_offset, 0), cut.rank)


def select(cells: Cells, parts: np.ndarray) -> Cells:
    """The given parts, renumbered in the given order; ``parts`` names none twice."""
    order = np.argsort(parts)
    place = np.searchsorted(parts[order], cells.part)
    place = np.minimum(place, len(parts) - 1)
    wanted = parts[order][place] == cells.part
    return sorted_cells(cells.slices[wanted], order[place[wanted]])


def table(cells: Cells, num_parts: int, q_len: int, k_len: int) -> SliceTable:
    """Kernel tables of all parts, int32 leaves ``[num_parts, ...]``."""
    made = build_table(cells.slices, cells.part, num_parts, q_len, k_len, 128)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.int32), made)


def sorted_cells(slices: np.ndarray, part: np.ndarray) -> Cells:
    """Visible slices in the order of parts, queries and keys."""
    seen = bands.is_visible(slices)
    slices, part = slices[seen], part[seen]
    order = np.lexsort((slices[:, bands.K_START], slices[:, bands.Q_START], part))
    return Cells(slices[order], part[order])
