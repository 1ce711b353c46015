"""Which queries travel: those that see so much that moving them costs less than moving their keys.

A query row with its output is an order of magnitude larger than a row of keys and values, so it has to be
few rows that see many keys: a global block. See docs/planner.md.
"""

from typing import NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.solver import intervals
from magi_jax.solver.cost.model import CostModel

# Rows travel when the predicted time falls at least to this share.
WORTHWHILE = 0.95
# Tried: all rows that need more keys than 3/4, 9/16, ... of the largest need.
NEED_STEP, NUM_STEPS = 0.75, 8


class Ranges(NamedTuple):
    """Rising disjoint query ranges ``[begin, end)``, ``[n]`` each."""

    begin: np.ndarray
    end: np.ndarray


NO_RANGES = Ranges(np.zeros(0, np.int64), np.zeros(0, np.int64))


def split_slices(slices: np.ndarray, ranges: Ranges) -> tuple[np.ndarray, np.ndarray]:
    """Slices ``[A, 6]`` of the queries outside of ``ranges``, and of those inside."""
    if not len(ranges.begin):
        return slices, slices[:0]
    parts = []
    last = int(max(slices[:, bands.Q_END].max(initial=0), ranges.end[-1])) + 1
    outside = Ranges(np.append(0, ranges.end), np.append(ranges.begin, last))
    kept = outside.begin < outside.end
    for begin, end in (Ranges(outside.begin[kept], outside.end[kept]), ranges):
        source, segment = intervals.meet(
            slices[:, bands.Q_START], slices[:, bands.Q_END], begin, end
        )
        cut = bands.clip(slices[source], q_start=begin[segment], q_end=end[segment])
        parts.append(cut[bands.is_visible(cut)])
    return parts[0], parts[1]


def choose_ranges(
    slices: np.ndarray,
    edges: np.ndarray,
    cp_size: int,
    ranks_per_node: int,
    model: CostModel,
    keys_len: int | None = None,
) -> Ranges:
    """Rows that should travel, if a dispatch spreads them well; none where that does not pay.

    Here rows cross between nodes once for each rank that needs them. In two steps they cross less often,
    which the exact prediction on the finished layout reckons with, and which may yet keep them at home.

    Args:
        slices: tight visible slices ``[A, 6]``.
        edges: chunk edges; rows are judged between them and the edges of slices.
        cp_size: number of ranks.
        ranks_per_node: ranks of a node.
        model: the machine.
        keys_len: keys of all ranks; None as many as queries.
    """
    rows_of_rank = int(edges[-1]) // cp_size
    share = rows_of_rank if keys_len is None else keys_len // cp_size
    if cp_size == 1 or not len(slices) or not _is_wide(slices, share):
        return NO_RANGES
    shapes = model.shapes(slices)
    kernel_us = sum(float(model.times_us(*shapes, way).sum()) for way in (False, True)) / cp_size
    speed = _Speed(cp_size, ranks_per_node, model)
    most = _most_keys(slices)
    most_us = max(kernel_us, speed.keys_us(most - share))
    if most_us <= kernel_us:
        return NO_RANGES  # kernels take longer than all keys, wherever the rows are
    if speed.rows_us(_neediest_rows(slices, NEED_STEP * most)) >= most_us:
        return NO_RANGES  # too many rows need nearly as much
    row, need, keys = _needs(slices, edges)
    best_us = first_us = max(kernel_us, speed.keys_us(int(need.max()) - share))
    chosen = None
    for step in range(1, NUM_STEPS + 1):
        leaves = need > need.max() * NEED_STEP**step
        left = int(need[~leaves].max(initial=0)) - share
        if max(kernel_us, speed.keys_us(left)) < best_us:
            rows = _most_rows(leaves, row.end - row.begin, keys)
            time_us = max(kernel_us, speed.keys_us(left) + speed.rows_us(rows))
            time_us += 2 * sum(model.merge_us(rows_of_rank, way) for way in (False, True))
            if time_us < best_us:
                best_us, chosen = time_us, leaves
    if chosen is None or best_us > WORTHWHILE * first_us:
        return NO_RANGES
    _, begin, end = intervals.union(np.zeros(chosen.sum(), int), *(x[chosen] for x in row))
    return Ranges(begin, end)


class _Speed(NamedTuple):
    """Times of both directions together, for ranks that exchange evenly with all others."""

    cp_size: int
    ranks_per_node: int
    model: CostModel

    def keys_us(self, rows: int) -> float:
        """To receive rows of keys and values, twice, and to return their gradients."""
        if rows <= 0:
            return 0.0
        near, far = self._parts(rows)
        return float(2 * self.model.cast_us(near, far) + self.model.reduce_us(near, far))

    def rows_us(self, rows: int) -> float:
        """To receive query rows, and as many partial results."""
        near, far = self._parts(rows)
        row_bytes = sum(sum(self.model.travel_bytes(way)) for way in (False, True))
        return float(self.model.move_us(near, far, row_bytes)) + 3 * self.model.latency_us

    def _parts(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        far = rows * (1 - self.ranks_per_node / self.cp_size)
        return np.asarray(rows - far), np.asarray(far)


class _Keys(NamedTuple):
    """Key intervals ``[begin, end)`` that elementary query range ``source`` sees."""

    source: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def _is_wide(slices: np.ndarray, share: int) -> bool:
    """Whether any row may need more keys than its rank owns."""
    return bool((slices[:, bands.K_END] - slices[:, bands.K_START]).max() > share)


def _most_keys(slices: np.ndarray) -> int:
    """No row needs more keys than this: the most that slices over it have, counted with overlaps."""
    width = slices[:, bands.K_END] - slices[:, bands.K_START]
    at = np.concatenate([slices[:, bands.Q_START], slices[:, bands.Q_END]])
    return _highest(at, np.concatenate([width, -width]))


def _neediest_rows(slices: np.ndarray, need: float) -> int:
    """At least so many rows see more keys than ``need``, one of which all of them see: the most of any slice
    whose rows see its first key.
    """
    q0, q1, k0, k1, d0, d1 = slices.T
    # Row q sees keys [k0, min(k1, q + d1 + 1)).
    wide = (d0 == k0 - q1 + 1) & (k1 - k0 > need)
    first = np.maximum(q0, np.ceil(need) + k0 - d1)
    return int((q1 - first)[wide].max(initial=0))


def _needs(slices: np.ndarray, edges: np.ndarray) -> tuple[Ranges, np.ndarray, _Keys]:
    """Elementary query ranges, the distinct keys that each needs, and which they are."""
    points = intervals.distinct(edges, slices[:, bands.Q_START], slices[:, bands.Q_END])
    begin, end = points[:-1], points[1:]
    source, piece = intervals.meet(slices[:, bands.Q_START], slices[:, bands.Q_END], begin, end)
    cut = bands.clip(slices[source], q_start=begin[piece], q_end=end[piece])
    keys = _Keys(*intervals.union(piece, cut[:, bands.K_START], cut[:, bands.K_END]))
    need = np.bincount(keys.source, keys.end - keys.begin, len(begin)).astype(np.int64)
    return Ranges(begin, end), need, keys


def _most_rows(leaves: np.ndarray, rows: np.ndarray, keys: _Keys) -> int:
    """The most leaving rows that see one key: what its owner receives at least."""
    seen = leaves[keys.source]
    weight = rows[keys.source[seen]]
    at = np.concatenate([keys.begin[seen], keys.end[seen]])
    return _highest(at, np.concatenate([weight, -weight]))


def _highest(at: np.ndarray, steps: np.ndarray) -> int:
    """The highest value of a sum that changes by ``steps [N]`` at positions ``at [N]``."""
    order = np.argsort(at, kind="stable")
    steps = np.cumsum(steps[order])
    last_of_place = np.append(np.diff(at[order]) > 0, True)
    return int(steps[last_of_place].max(initial=0))
