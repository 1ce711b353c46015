"""One piece of a mask: a query range, a key range and a band of diagonals."""

import dataclasses
import enum

import numpy as np

from magi_jax.masks import bands

# Stands for "no bound" on a diagonal. Lengths stay below 2**31, so it never cuts a cell.
UNBOUNDED = 2**40


class MaskType(enum.IntEnum):
    """Shape of a slice inside its rectangle of queries ``[q0, q1)`` and keys ``[k0, k1)``.

    Attributes:
        FULL: every query sees every key.
        CAUSAL: aligned bottom-right, ``k - q <= k1 - q1``; the last query sees all keys.
        INV_CAUSAL: aligned top-left, ``k - q >= k0 - q0``; the first query sees all keys.
        BI_CAUSAL: both.
    """

    FULL = 0
    CAUSAL = 1
    INV_CAUSAL = 2
    BI_CAUSAL = 3


def band_columns(types: np.ndarray, q_ranges: np.ndarray, k_ranges: np.ndarray) -> np.ndarray:
    """Diagonal bounds ``[A, 2]`` of mask types ``[A]`` in their ranges, ``[A, 2]`` each."""
    bounded_below = (types == MaskType.INV_CAUSAL) | (types == MaskType.BI_CAUSAL)
    bounded_above = (types == MaskType.CAUSAL) | (types == MaskType.BI_CAUSAL)
    d_min = np.where(bounded_below, k_ranges[:, 0] - q_ranges[:, 0], -UNBOUNDED)
    d_max = np.where(bounded_above, k_ranges[:, 1] - q_ranges[:, 1], UNBOUNDED)
    return np.stack([d_min, d_max], axis=1)


@dataclasses.dataclass(frozen=True)
class AttnSlice:
    """A band slice: query ``q`` sees key ``k`` in its ranges if ``d_min <= k - q <= d_max``.

    Attributes:
        q_start: first query.
        q_end: one past the last query.
        k_start: first key.
        k_end: one past the last key.
        d_min: lowest visible diagonal ``k - q``; None for no bound.
        d_max: highest visible diagonal ``k - q``; None for no bound.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    d_min: int | None = None
    d_max: int | None = None

    @classmethod
    def from_type(
        cls, q_range: tuple[int, int], k_range: tuple[int, int], mask_type: MaskType | int
    ) -> "AttnSlice":
        """The slice of a mask type in the rectangle ``q_range`` x ``k_range``."""
        mask_type = MaskType(mask_type)
        below = mask_type in (MaskType.INV_CAUSAL, MaskType.BI_CAUSAL)
        above = mask_type in (MaskType.CAUSAL, MaskType.BI_CAUSAL)
        return cls(
            *q_range,
            *k_range,
            d_min=k_range[0] - q_range[0] if below else None,
            d_max=k_range[1] - q_range[1] if above else None,
        )

    @property
    def row(self) -> np.ndarray:
        """The tight row of this slice, int64 ``[6]``; zeros when no cell is visible."""
        d_min = -UNBOUNDED if self.d_min is None else self.d_min
        d_max = UNBOUNDED if self.d_max is None else self.d_max
        row = [self.q_start, self.q_end, self.k_start, self.k_end, d_min, d_max]
        return bands.tighten(np.array([row], np.int64))[0]

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        return int(bands.area(self.row[None])[0])

    @property
    def mask_type(self) -> MaskType | None:
        """The mask type of the tight slice in its own rectangle, None when it has none.

        Where several do (a single row, for one), the one with the lowest value.
        """
        row = self.row
        for mask_type in MaskType:
            typed = self.from_type(tuple(row[:2].tolist()), tuple(row[2:4].tolist()), mask_type)
            if np.array_equal(typed.row, row):
                return mask_type
        return None
