"""What a dispatch strategy is asked, and what it answers.

A strategy cuts ``[0, seq_len)`` into units and gives each to a rank: ``strategy(problem) -> Assignment``.
Units may have any lengths.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals


class DispatchProblem(NamedTuple):
    """What a strategy may look at.

    Attributes:
        slices: tight visible slices ``[A, 6]``, int64, of queries whose keys come to them.
        edges: chunk edges ``[C + 1]`` from 0 to ``seq_len``.
        cp_size: number of ranks.
        ranks_per_node: ranks that share a fast link; None = all of them.
        effort: "fast" or "high"; how long `balanced` searches.
        engine: "compiled" or "numpy"; what `balanced` searches with. Both find the same.
        travelling: slices ``[B, 6]`` of queries that travel: the work falls on the owners of keys.
        row_weight: what moving a travelling query row costs, in rows of keys and values.
    """

    slices: np.ndarray
    edges: np.ndarray
    cp_size: int
    ranks_per_node: int | None = None
    effort: str = "fast"
    engine: str = "compiled"
    travelling: np.ndarray = np.zeros((0, bands.NUM_COLUMNS), np.int64)
    row_weight: float = 1.0


class Assignment(NamedTuple):
    """Units and their ranks: ``edges [U + 1]`` from 0 to ``seq_len``, ``owner [U]``."""

    edges: np.ndarray
    owner: np.ndarray


def chunk_edges(seq_len: int, chunk_size: int) -> np.ndarray:
    """Edges ``[C + 1]`` of chunks of ``chunk_size`` tokens; the last may be short."""
    return np.append(np.arange(0, seq_len, chunk_size), seq_len)


def even_cuts(rows: int, parts: int) -> np.ndarray:
    """Where ``rows`` are cut into parts that differ by one at most, ``[parts + 1]``."""
    return rows * np.arange(parts + 1) // parts


def cut_at(slices: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slices cut at query ``edges``: (interval of each piece, tight pieces ``[C, 6]``), visible ones
    only.
    """
    source, part = intervals.meet(
        slices[:, bands.Q_START], slices[:, bands.Q_END], edges[:-1], edges[1:]
    )
    cut = bands.clip(slices[source], q_start=edges[part], q_end=edges[part + 1])
    seen = bands.is_visible(cut)
    return part[seen], cut[seen]


def areas(part: np.ndarray, cut: np.ndarray, num_parts: int) -> np.ndarray:
    """Cells of each part, int64 ``[num_parts]``."""
    # Float64 sums are exact below 2**53 cells.
    return np.bincount(part, weights=bands.area(cut), minlength=num_parts).astype(np.int64)


def chunk_areas(problem: DispatchProblem) -> np.ndarray:
    """Work that comes with each chunk, int64 ``[C]``: of its queries, and of queries that travel to its
    keys.
    """
    edges = problem.edges
    area = areas(*cut_at(problem.slices, edges), len(edges) - 1)
    if len(problem.travelling):
        area += areas(*cut_at(bands.transpose(problem.travelling), edges), len(edges) - 1)
    return area


class RowAreas(NamedTuple):
    """Visible keys of every row, as a function that is linear between points.

    Attributes:
        at: ``[P]`` rows, rising, some more than once; the first is 0.
        keys: ``[P]`` keys of the row ``at``; the last entry of a row counts.
        slope: ``[P]`` more keys of each row after it.
        total: ``[P]`` keys of all rows before ``at``.
    """

    at: np.ndarray
    keys: np.ndarray
    slope: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, slices: np.ndarray, edges: np.ndarray) -> "RowAreas":
        """Of tight slices ``[A, 6]``, with points at ``edges`` too."""
        q0, q1, k0, k1, d0, d1 = slices.T
        # Row q sees keys [max(k0, q + d0), min(k1, q + d1 + 1)).
        high, low = np.clip(k1 - d1 - 1, q0, q1), np.clip(k0 - d0, q0, q1)
        ones = np.ones_like(q0)
        parts = (
            (q0, q0 + d1 + 1 - k0, ones),
            (high, k1 - (high + d1 + 1), -ones),
            (low, k0 - (low + d0), -ones),
            (q1, -(np.minimum(k1, q1 + d1 + 1) - np.maximum(k0, q1 + d0)), 0 * ones),
        )
        at, keys, slope = (np.concatenate(column) for column in zip(*parts, strict=True))
        # What a slice still rises by where it ends.
        ends = np.where(high < q1, 0, 1) - np.where(low < q1, 1, 0)
        slope[-len(q0) :] = -ends
        none = np.zeros_like(edges)
        at, keys, slope = (
            np.append(column, more)
            for column, more in zip((at, keys, slope), (edges, none, none), strict=True)
        )
        order = np.argsort(at, kind="stable")
        at, slope = at[order], np.cumsum(slope[order])
        gap = np.diff(at, append=at[-1:])
        keys = np.cumsum(keys[order] + np.append(0, (slope * gap)[:-1]))
        area = keys * gap + slope * (gap * (gap - 1) // 2)
        return cls(at, keys, slope, np.cumsum(area) - area)

    def before(self, row: np.ndarray) -> np.ndarray:
        """Keys of all rows before each of ``row``."""
        point = np.searchsorted(self.at, row, side="right") - 1
        n = row - self.at[point]
        return self.total[point] + self.keys[point] * n + self.slope[point] * (n * (n - 1) // 2)
