"""Checks of what callers hand in; every failure is a ValueError that names the values."""

import operator
from typing import Any

import numpy as np

from magi_jax.masks import bands
from magi_jax.masks.attn_slice import UNBOUNDED, MaskType, band_columns

# Kernels add a position and a diagonal in int32; their sum stays below q_len + k_len.
MAX_TOTAL_LENGTH = 2**31 - 1


def integer(name: str, value: Any) -> int:
    """An int; bools and floats are refused."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return max(-UNBOUNDED, min(operator.index(value), UNBOUNDED))
    except TypeError:
        raise ValueError(f"{name} must be an integer; got {value!r}") from None


def length(name: str, value: Any) -> int:
    """A length as an int that is not negative."""
    number = integer(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative; got {number}")
    return number


def count(name: str, value: Any) -> int:
    """A number of parts as an int that is at least 1."""
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1; got {number}")
    return number


def sequence_lengths(q_len: Any, k_len: Any) -> tuple[int, int]:
    """Both lengths, refused when positions and diagonals would leave int32."""
    q_len, k_len = length("q_len", q_len), length("k_len", k_len)
    if q_len + k_len > MAX_TOTAL_LENGTH:
        raise ValueError(
            f"q_len + k_len must be at most {MAX_TOTAL_LENGTH}, so that offsets fit int32; "
            f"got {q_len=} {k_len=}"
        )
    return q_len, k_len


def window(value: Any, causal: bool = False) -> tuple[int, int]:
    """Reach of a window ``(left, right)``; None is unbounded, ``causal`` caps right at 0."""
    if value is None:
        value = (None, None)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"window must be (left, right), None for unbounded; got {value!r}")
    left, right = (UNBOUNDED if side is None else integer("window", side) for side in value)
    if left < 0 or right < 0:
        raise ValueError(f"window must not be negative (None is unbounded); got {value!r}")
    return left, min(right, 0) if causal else right


def integers(name: str, value: Any, ndim: int = 1) -> np.ndarray:
    """An int64 array of ``ndim`` axes; an empty list is an empty array."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a regular array of integers: {error}") from None
    except TypeError as error:
        raise TypeError(
            f"{name} must have its values on the host, got {type(value).__name__}: masks are made outside"
            " of jit, and a jitted function takes their plans or slice tables as arguments"
        ) from error
    if array.size == 0 and array.ndim == 1:
        return np.zeros((0,) + (2,) * (ndim - 1), np.int64)
    if array.ndim != ndim:
        wanted = "one axis" if ndim == 1 else f"{ndim} axes"
        hints = {0: f"; [{value}] is a list of one", 2: "; a batch has a mask for each sequence"}
        hint = hints.get(array.ndim, "") if ndim == 1 else ""
        raise ValueError(f"{name} must have {wanted}; got shape {array.shape}{hint}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be integers; got dtype {array.dtype}")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit int64; got {array.max()}")
    return array.astype(np.int64)


def lengths(name: str, value: Any) -> np.ndarray:
    """Lengths of parts, int64 ``[D]``, none negative."""
    array = integers(name, value)
    bad = np.flatnonzero(array < 0)
    if len(bad):
        raise ValueError(f"{name}[{bad[0]}] = {array[bad[0]]} is negative")
    return array


def ranges(name: str, value: Any, length_name: str, limit: int) -> np.ndarray:
    """Ranges ``[A, 2]`` that rise and stay inside ``[0, limit]``."""
    array = integers(name, value, ndim=2)
    if array.shape[1] != 2:
        raise ValueError(f"{name} must have shape [A, 2] of (start, end); got shape {array.shape}")
    start, end = array.T
    for wrong, what in (
        (start > end, "is reversed"),
        ((start < 0) | (end > limit), f"leaves the sequence of {length_name}={limit}"),
    ):
        bad = np.flatnonzero(wrong)
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}] = {array[bad[0]].tolist()} {what}")
    return array


def slice_rows(value: Any, q_len: int, k_len: int) -> np.ndarray:
    """Rows ``[A, 6]`` whose ranges lie inside the rectangle."""
    rows = np.asarray(value)
    if rows.ndim != 2 or rows.shape[1] != bands.NUM_COLUMNS or rows.dtype != np.int64:
        raise ValueError(f"slices must be int64 [A, 6]; got {rows.dtype} {list(rows.shape)}")
    ranges("query ranges", rows[:, bands.Q_START : bands.K_START], "q_len", q_len)
    ranges("key ranges", rows[:, bands.K_START : bands.D_MIN], "k_len", k_len)
    return rows


def diagonals(types: Any, q_ranges: np.ndarray, k_ranges: np.ndarray) -> np.ndarray:
    """Diagonal bounds ``[A, 2]`` of what a caller may write for types."""
    count = len(q_ranges)
    if not isinstance(types, (list, tuple)) and np.ndim(types) == 0:
        types = np.full(count, int(_mask_type("types", types)), np.int64)
    if len(types) != count:
        raise ValueError(f"types must be one per slice; got {len(types)} for {count} slices")
    if isinstance(types, np.ndarray) or hasattr(types, "__array__"):
        array = integers("types", types, ndim=np.ndim(types))
        if array.ndim == 2 and array.shape[1] == 2:
            return np.clip(array, -UNBOUNDED, UNBOUNDED)
        if array.ndim != 1:
            raise ValueError(f"types must have shape [A] or [A, 2]; got {list(array.shape)}")
        types = array.tolist()
    parsed = [_type_or_band(f"types[{i}]", entry) for i, entry in enumerate(types)]
    kinds = np.array([-1 if isinstance(entry, tuple) else entry for entry in parsed], np.int64)
    columns = band_columns(kinds, q_ranges, k_ranges)
    written = np.flatnonzero(kinds < 0)
    columns[written] = np.array([parsed[i] for i in written], np.int64).reshape(-1, 2)
    return columns


def _mask_type(name: str, value: Any) -> MaskType:
    try:
        return MaskType(integer(name, value))
    except ValueError:
        names = ", ".join(f"{member.name} = {member.value}" for member in MaskType)
        raise ValueError(
            f"{name} must be a MaskType ({names}) or a band (d_min, d_max); got {value!r}"
        ) from None


def _type_or_band(name: str, entry: Any) -> MaskType | tuple[int, int]:
    if not isinstance(entry, (tuple, list, np.ndarray)):
        return _mask_type(name, entry)
    if len(entry) != 2:
        raise ValueError(f"{name} must be a band (d_min, d_max); got {entry!r}")
    low, high = entry
    low = -UNBOUNDED if low is None else integer(f"d_min of {name}", low)
    high = UNBOUNDED if high is None else integer(f"d_max of {name}", high)
    return low, high
