"""Moving tokens between layouts in NumPy: in a data loader, on whole arrays, without a device.

Arrays have the sequence on ``axis``: ``seq_len`` rows in global order, ``cp * local_len``
dispatched. Row ``r * local_len + i`` of the second is local row ``i`` of rank ``r``.
"""

import numpy as np


def dispatch(x: np.ndarray, positions: np.ndarray, axis: int) -> np.ndarray:
    """Dispatched rows of ``x``, zeros in padding.

    Args:
        x: any dtype, sequence on ``axis``.
        positions: global position of each dispatched row, -1 = padding, ``[rows]``.
        axis: the sequence axis.
    """
    rows = np.take(x, np.maximum(positions, 0), axis=axis)
    return np.where(_along(positions >= 0, axis, x.ndim), rows, np.zeros((), x.dtype))


def undispatch(x: np.ndarray, positions: np.ndarray, seq_len: int, axis: int) -> np.ndarray:
    """Rows in global order, the inverse of `dispatch`; arguments likewise."""
    return np.take(x, _row_of(positions, seq_len), axis=axis)


def roll(x: np.ndarray, positions: np.ndarray, seq_len: int, shift: int, axis: int) -> np.ndarray:
    """Dispatched rows of the shifted sequence: position ``p`` gets what was at ``p - shift``."""
    source = positions - np.clip(shift, -seq_len, seq_len)  # further is out of sight as well
    inside = (positions >= 0) & (source >= 0) & (source < seq_len)
    rows = np.take(x, _row_of(positions, seq_len)[np.where(inside, source, 0)], axis=axis)
    return np.where(_along(inside, axis, x.ndim), rows, np.zeros((), x.dtype))


def _row_of(positions, seq_len):
    """Dispatched row of each global position."""
    row_of = np.zeros(seq_len, np.int64)
    rows = np.flatnonzero(positions >= 0)
    row_of[positions[rows]] = rows
    return row_of


def _along(values, axis, ndim):
    return np.reshape(values, [-1 if i == axis % ndim else 1 for i in range(ndim)])
