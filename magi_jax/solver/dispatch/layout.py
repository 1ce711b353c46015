"""Where the tokens of a sequence end up: segments, their ranks, and their local rows."""

from typing import NamedTuple

import numpy as np

from magi_jax.solver import intervals
from magi_jax.solver.dispatch.problem import Assignment


class Layout(NamedTuple):
    """Segments of the sequence in global order; neighbours have different owners.

    Attributes:
        edges: ``[G + 1]`` from 0 to ``seq_len``; segment ``g`` is ``[edges[g], edges[g + 1])``.
        owner: ``[G]`` its rank.
        local_start: ``[G]`` its first row at the owner; each rank keeps its segments in global
            order.
        cp_size: number of ranks.
    """

    edges: np.ndarray
    owner: np.ndarray
    local_start: np.ndarray
    cp_size: int

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return int(self.edges[-1])

    @property
    def offset(self) -> np.ndarray:
        """``[G]`` what is added to a global position of a segment to get its local row."""
        return self.local_start - self.edges[:-1]

    def segment_of(self, position: np.ndarray) -> np.ndarray:
        """Segment of each global position."""
        return np.searchsorted(self.edges, position, side="right") - 1


def make_layout(assignment: Assignment, cp_size: int) -> Layout:
    """Merges neighbouring units of one owner and packs each rank's segments in global order."""
    size = np.diff(assignment.edges)
    edges, owner = assignment.edges[:-1][size > 0], assignment.owner[size > 0]
    first = np.flatnonzero(np.diff(owner, prepend=-1) != 0)
    edges = np.append(edges[first], assignment.edges[-1])
    owner = owner[first]
    order = np.argsort(owner, kind="stable")
    local_start = np.empty_like(owner)
    local_start[order] = intervals.offsets(owner[order], np.diff(edges)[order], cp_size)
    return Layout(edges, owner, local_start, cp_size)
