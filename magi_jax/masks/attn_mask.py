"""The mask: disjoint band slices over a rectangle of queries and keys."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from magi_jax.masks import algebra, bands, checks, convert, disjoint, overview
from magi_jax.masks.attn_slice import AttnSlice

# Largest dense mask made without being asked for more: 256 MiB, a square of 16,384 tokens.
DENSE_CELLS = 2**28

MASKS_COME_FROM = "magi_jax.masks builds masks, from dense arrays too (masks.from_dense)"


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class AttnMask:
    """Which keys each query sees, as slices that share no cell. Immutable, hashable and picklable.

    Two masks are equal when they have the same lengths and the same slices. One set of cells can be
    cut into slices in several ways; `same_cells` looks through that.

    Attributes:
        slices: tight rows ``(q_start, q_end, k_start, k_end, d_min, d_max)`` as `masks.bands`
            describes them, sorted by query and key, read-only int64 ``[A, 6]``. Iterating over a
            mask gives them as `AttnSlice`.
        q_len: number of queries T.
        k_len: number of keys S.
    """

    slices: np.ndarray
    q_len: int
    k_len: int

    def __init__(self, slices: np.ndarray, q_len: int, k_len: int, *, disjoint: bool = False):
        """Makes a mask of rows ``[A, 6]``; `from_slices` takes looser forms.

        Args:
            slices: rows inside the rectangle, in any order, int64; those without a visible cell are
                dropped.
            q_len: number of queries.
            k_len: number of keys.
            disjoint: the caller knows that no two slices share a cell, so that nothing is checked.

        Raises:
            ValueError: rows leave the rectangle, two of them share a cell, or the lengths are too
                large.
        """
        q_len, k_len = checks.sequence_lengths(q_len, k_len)
        rows = checks.slice_rows(slices, q_len, k_len)
        rows = bands.tighten(rows)
        if not disjoint:
            _refuse_overlap(rows)
        rows = rows[bands.is_visible(rows)]
        rows = np.ascontiguousarray(
            rows[np.lexsort(rows.T[[bands.D_MIN, bands.K_START, bands.Q_START]])]
        )
        rows.flags.writeable = False
        object.__setattr__(self, "slices", rows)
        object.__setattr__(self, "q_len", q_len)
        object.__setattr__(self, "k_len", k_len)

    @classmethod
    def from_slices(
        cls, q_ranges: Any, k_ranges: Any, types: Any, q_len: int, k_len: int | None = None
    ) -> "AttnMask":
        """Makes a mask of query ranges, key ranges and types, one of each per slice.

        Args:
            q_ranges: ``[A, 2]`` integers, ``(start, end)`` of each slice's queries; lists or an
                array.
            k_ranges: ``[A, 2]`` integers, ``(start, end)`` of each slice's keys.
            types: for each slice a `MaskType`, its integer, or a band ``(d_min, d_max)`` on
                ``k - q`` whose ends may be None for no bound; an array ``[A]`` or ``[A, 2]``; or
                one MaskType for all.
            q_len: number of queries.
            k_len: number of keys; ``q_len`` if not given.

        Returns:
            The mask. Slices without a visible cell are legal and dropped.

        Raises:
            ValueError: wrong shapes or dtypes, ranges that are reversed or leave the sequence, or
                two slices that share a cell; the message names the values.
        """
        k_len = q_len if k_len is None else k_len
        q_len, k_len = checks.sequence_lengths(q_len, k_len)
        q_ranges = checks.ranges("q_ranges", q_ranges, "q_len", q_len)
        k_ranges = checks.ranges("k_ranges", k_ranges, "k_len", k_len)
        if len(q_ranges) != len(k_ranges):
            raise ValueError(
                "q_ranges and k_ranges must be equally many; "
                f"got {len(q_ranges)} and {len(k_ranges)}"
            )
        diagonals = checks.diagonals(types, q_ranges, k_ranges)
        return cls(np.concatenate([q_ranges, k_ranges, diagonals], axis=1), q_len, k_len)

    @property
    def num_slices(self) -> int:
        """Number of slices A."""
        return len(self.slices)

    @functools.cached_property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        return int(bands.area(self.slices).sum())

    @property
    def density(self) -> float:
        """Visible part of all (query, key) pairs, 0 for an empty rectangle."""
        return self.area / max(self.q_len * self.k_len, 1)

    def __iter__(self) -> Iterator[AttnSlice]:
        return (AttnSlice(*row) for row in self.slices.tolist())

    def row_counts(self) -> np.ndarray:
        """Number of keys that each query sees, int64 ``[T]``."""
        return convert.row_counts(self.slices, self.q_len)

    def dense(self, max_cells: int = DENSE_CELLS) -> np.ndarray:
        """The mask as a boolean array ``[T, S]``, for tests and pictures.

        Raises:
            ValueError: the array would have more than ``max_cells`` elements.
        """
        cells = self.q_len * self.k_len
        if cells > max_cells:
            raise ValueError(
                f"a dense mask of {self.q_len} x {self.k_len} has {cells} cells, more than "
                f"{max_cells=}; crop the mask, look at its sketch() or coverage(rows), or pass a larger"
                " max_cells"
            )
        return convert.dense(self.slices, self.q_len, self.k_len)

    def coverage(self, rows: int, columns: int | None = None) -> np.ndarray:
        """Visible share of each of ``rows`` x ``columns`` blocks, exact at any length.

        With as many rows as a clip has frames, or a batch documents of one length, it says which of them
        see which; `matplotlib.pyplot.imshow` draws it.

        Args:
            rows: even parts of the queries, of ``T * i // rows`` to ``T * (i + 1) // rows``.
            columns: even parts of the keys; ``rows`` if not given.

        Returns:
            float64 ``[rows, columns]``, from 0 (no cell is visible) to 1 (all are).

        Raises:
            ValueError: a number of parts is less than 1.
        """
        rows = checks.count("rows", rows)
        columns = rows if columns is None else checks.count("columns", columns)
        return overview.coverage(self.slices, self.q_len, self.k_len, rows, columns)

    def sketch(self, rows: int = 32) -> str:
        """The mask in letters, to be printed: queries from top to bottom, keys from left to right.

        ``##`` is a block that is visible as a whole, ``++`` in part, ``..`` not at all. There are at most
        ``rows`` rows and twice as many columns; up to there blocks are square.

        Raises:
            ValueError: ``rows`` is less than 1.
        """
        most_columns = max(min(2 * checks.count("rows", rows), self.k_len), 1)
        rows = max(min(rows, self.q_len), 1)
        block = max(self.q_len / rows, 1)
        columns = min(max(round(self.k_len / block), 1), most_columns)
        return overview.sketch(self.coverage(rows, columns))

    def to_mask_types(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The mask as ``(q_ranges [B, 2], k_ranges [B, 2], types [B])``, int64, disjoint.

        Slices that have no `MaskType` are cut by queries into two or three that have one.
        """
        return convert.to_mask_types(self.slices)

    def transpose(self) -> "AttnMask":
        """The mask with queries and keys exchanged."""
        return AttnMask(bands.transpose(self.slices), self.k_len, self.q_len, disjoint=True)

    def crop(self, q_range: tuple[int, int], k_range: tuple[int, int]) -> "AttnMask":
        """The part inside ``q_range`` x ``k_range``, moved to the origin."""
        (q0, q1), (k0, k1) = q_range, k_range
        checks.ranges("q_range", [q_range], "q_len", self.q_len)
        checks.ranges("k_range", [k_range], "k_len", self.k_len)
        cut = bands.clip(self.slices, q_start=q0, q_end=q1, k_start=k0, k_end=k1)
        cut = cut[bands.is_visible(cut)]
        return AttnMask(bands.shift(cut, -q0, -k0), q1 - q0, k1 - k0, disjoint=True)

    def shift(
        self, q_offset: int, k_offset: int, q_len: int | None = None, k_len: int | None = None
    ) -> "AttnMask":
        """The mask moved into a rectangle of ``q_len`` x ``k_len`` (the same if not given).

        Raises:
            ValueError: a slice leaves the new rectangle.
        """
        q_len = self.q_len if q_len is None else q_len
        k_len = self.k_len if k_len is None else k_len
        return AttnMask(bands.shift(self.slices, q_offset, k_offset), q_len, k_len, disjoint=True)

    def simplify(self) -> "AttnMask":
        """The same cells in fewer slices where two abutting slices are one; not a minimum."""
        return AttnMask(algebra.merge(self.slices), self.q_len, self.k_len, disjoint=True)

    def same_cells(self, other: "AttnMask") -> bool:
        """Whether both masks show the same cells, however they are cut into slices."""
        return self.area == other.area == (self & other).area

    def __and__(self, other: "AttnMask") -> "AttnMask":
        """Cells visible in both masks."""
        self._refuse_other_size(other)
        return AttnMask(
            algebra.intersection(self.slices, other.slices), self.q_len, self.k_len, disjoint=True
        )

    def __or__(self, other: "AttnMask") -> "AttnMask":
        """Cells visible in either mask; the two may overlap."""
        self._refuse_other_size(other)
        return AttnMask(
            algebra.union(self.slices, other.slices), self.q_len, self.k_len, disjoint=True
        )

    # A NumPy array on the left would otherwise take the mask for one of its own entries.
    __array_ufunc__ = None
    __rand__, __ror__ = __and__, __or__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnMask):
            return NotImplemented
        same_lengths = (self.q_len, self.k_len) == (other.q_len, other.k_len)
        return same_lengths and np.array_equal(self.slices, other.slices)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.q_len, self.k_len, self.slices.tobytes()))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return (
            f"AttnMask(q_len={self.q_len}, k_len={self.k_len}, num_slices={self.num_slices}, "
            f"density={self.density:.4g})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # NumPy does not pickle the read-only flag, and a hash of bytes differs between processes.
        return functools.partial(AttnMask, disjoint=True), (self.slices, self.q_len, self.k_len)

    def _refuse_other_size(self, other: "AttnMask") -> None:
        require_mask(other)
        if (self.q_len, self.k_len) != (other.q_len, other.k_len):
            raise ValueError(
                "masks of different lengths cannot be combined: "
                f"{self.q_len} x {self.k_len} and {other.q_len} x {other.k_len}"
            )


def require_mask(mask: object) -> None:
    """Raises TypeError unless this is an `AttnMask`."""
    if not isinstance(mask, AttnMask):
        raise TypeError(f"mask must be an AttnMask, got {type(mask).__name__}; {MASKS_COME_FROM}")


def concatenate(masks: Sequence[AttnMask]) -> AttnMask:
    """Puts masks one after the other; tokens of different masks do not see each other.

    Raises:
        TypeError: one of them is no mask.
    """
    masks = list(masks)
    for mask in masks:
        require_mask(mask)
    q_offset = np.cumsum([0, *(mask.q_len for mask in masks)])
    k_offset = np.cumsum([0, *(mask.k_len for mask in masks)])
    rows = [
        bands.shift(mask.slices, q, k)
        for mask, q, k in zip(masks, q_offset[:-1], k_offset[:-1], strict=True)
    ]
    stacked = np.concatenate([np.zeros((0, bands.NUM_COLUMNS), np.int64), *rows])
    return AttnMask(stacked, int(q_offset[-1]), int(k_offset[-1]), disjoint=True)


def _refuse_overlap(rows: np.ndarray) -> None:
    pair = disjoint.find_overlap(rows)
    if pair is None:
        return
    first, second = pair
    query, key = disjoint.shared_cell(rows[first], rows[second])
    a, b = AttnSlice(*rows[first].tolist()), AttnSlice(*rows[second].tolist())
    raise ValueError(
        f"slices {first} and {second} overlap, both cover (query {query}, key {key}): "
        f"{first} is {a}, {second} is {b}; "
        "a cell may belong to one slice only (the | of two masks makes their slices disjoint)"
    )
