"""A dense boolean mask as few slices."""

from typing import Any, NamedTuple

import numpy as np

from magi_jax.masks import bands
from magi_jax.masks.attn_mask import AttnMask


class _Open(NamedTuple):
    """A slice that grows by rows: its lower bound stays, then climbs; its upper one the reverse."""

    q_start: int
    k_start: int
    first_high: int
    low_climbs: bool
    high_stays: bool


def from_dense(dense: Any) -> AttnMask:
    """The mask of any boolean array ``[T, S]``, exact, in few slices (not always the fewest).

    Runs of visible keys are followed downwards for as long as they form one band slice. Costs
    O(T * S) vectorised steps and one short step per run of visible keys in a query.

    Raises:
        ValueError: ``dense`` is no boolean array with two axes.
    """
    dense = np.asarray(dense)
    if dense.ndim != 2 or dense.dtype != bool:
        raise ValueError(
            f"dense must be a bool array [T, S]; got {dense.dtype} {list(dense.shape)}"
        )
    q_len, k_len = dense.shape
    query, low, high = _runs(dense)
    bounds = np.searchsorted(query, np.arange(q_len + 1)).tolist()
    low, high = low.tolist(), high.tolist()
    done: list[tuple[int, ...]] = []
    growing: dict[int, tuple[_Open, int]] = {}  # by the lower bound in the last row, with the upper
    for row in range(q_len):
        before, growing = growing, {}
        for run in range(bounds[row], bounds[row + 1]):
            growing[low[run]] = (_extend(before, row, low[run], high[run]), high[run])
        done += [_close(piece, row - 1, last_low, end) for last_low, (piece, end) in before.items()]
    done += [_close(piece, q_len - 1, last_low, end) for last_low, (piece, end) in growing.items()]
    rows = np.array(done, np.int64).reshape(-1, bands.NUM_COLUMNS)
    return AttnMask(rows, q_len, k_len, disjoint=True).simplify()


def _runs(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximal intervals of visible keys, ordered by query: query, low and high of each."""
    edges = np.diff(dense.astype(np.int8), axis=1, prepend=0, append=0)
    query, low = np.nonzero(edges == 1)
    return query, low, np.nonzero(edges == -1)[1]


def _extend(before: dict[int, tuple[_Open, int]], row: int, low: int, high: int) -> _Open:
    """The slice of the row above that the run ``[low, high)`` continues, or a new one."""
    for last_low in (low, low - 1):
        if last_low not in before:
            continue
        piece, last_high = before[last_low]
        climbs = low > last_low
        stays = high == last_high
        if (high == last_high + 1 or stays) and (climbs or not piece.low_climbs):
            if stays or not piece.high_stays:
                del before[last_low]
                return piece._replace(low_climbs=climbs, high_stays=stays)
    return _Open(row, low, high, low_climbs=False, high_stays=False)


def _close(piece: _Open, last_row: int, last_low: int, last_high: int) -> tuple[int, ...]:
    d_min = last_low - last_row
    d_max = piece.first_high - 1 - piece.q_start
    return piece.q_start, last_row + 1, piece.k_start, last_high, d_min, d_max
