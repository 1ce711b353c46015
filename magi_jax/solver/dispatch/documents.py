"""Documents: the parts of a sequence that share no visible pair; and groups of short neighbours.

Documents are dealt out one by one while they are few. Of a million, neighbours are grouped first: what a
group of short ones is worth to a rank is its rows and its area, whatever is inside.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver.engine import compiled


class Groups(NamedTuple):
    """Runs of whole documents.

    Attributes:
        edges: ``[G + 1]`` from 0 to the end of the sequence.
        slices: ``[B, 6]`` tight slices with as much area in each group as the documents: those of long
            documents themselves, and rectangles in place of all short documents of a group.
    """

    edges: np.ndarray
    slices: np.ndarray


def document_edges(slices: np.ndarray, seq_len: int) -> np.ndarray:
    """Edges ``[N + 1]`` of the parts of a sequence that share no visible pair: no slice crosses one."""
    begin = np.minimum(slices[:, bands.Q_START], slices[:, bands.K_START])
    end = np.maximum(slices[:, bands.Q_END], slices[:, bands.K_END])
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    # Between two documents there may be rows that see nothing; they are one of their own.
    first = np.append(True, begin[1:] >= reach[:-1])[: len(begin)]
    last = np.append(first[1:], True)[: len(begin)]
    edges = np.zeros(2 * int(first.sum()) + 2, np.int64)
    edges[1:-1:2], edges[2:-1:2], edges[-1] = begin[first], reach[last], seq_len
    return edges[np.append(True, np.diff(edges) > 0)]


def document_groups(slices: np.ndarray, seq_len: int, most: int, engine: str = "numpy") -> Groups:
    """Groups neighbouring documents.

    Every document longer than ``2 / most`` of the sequence is a group of its own; of the others those that
    begin between two multiples of this length, with no longer one between them, are one.

    Args:
        slices: tight visible slices ``[A, 6]``.
        seq_len: rows of the sequence.
        most: the number of groups, at most; at least 2.
        engine: "numpy" or "compiled"; both group alike.
    """
    step = -(-2 * seq_len // most)
    find = compiled().document_groups if engine == "compiled" else _find_groups
    edges, area, of_long = find(slices, seq_len, step)
    return Groups(edges, np.concatenate([slices[of_long], _rectangles(edges, area)]))


def _find_groups(
    slices: np.ndarray, seq_len: int, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges of groups ``[G + 1]``, the area of all short documents in each ``[G]``, and which slices are of
    documents longer than ``step``, rising.
    """
    edges = document_edges(slices, seq_len)
    cell, is_long = edges[:-1] // step, np.diff(edges) > step
    kept = np.append(True, cell[1:] != cell[:-1]) | is_long
    document = np.searchsorted(edges, slices[:, bands.Q_START], side="right") - 1
    group = (np.cumsum(kept) - 1)[document]
    short = ~is_long[document]
    # Float64 sums are exact below 2**53 cells.
    area = np.bincount(group[short], bands.area(slices[short]), int(kept.sum()))
    return edges[np.append(kept, True)], area.astype(np.int64), np.flatnonzero(~short)


def _rectangles(edges: np.ndarray, area: np.ndarray) -> np.ndarray:
    """Slices ``[B, 6]`` that fill the rows between ``edges [G + 1]`` with ``area [G]`` evenly: to a key."""
    begin, end = edges[:-1], edges[1:]
    keys, more = np.divmod(area, end - begin)
    q_start, q_end = np.append(begin, begin + more), np.append(begin + more, end)
    k_end = np.append(keys + 1, keys)
    slices = np.stack(
        [q_start, q_end, np.zeros_like(k_end), k_end, 1 - q_end, k_end - 1 - q_start], axis=1
    )
    return slices[(q_start < q_end) & (k_end > 0)]
