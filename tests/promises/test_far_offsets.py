"""Masks at the far end of what int32 holds: as exact as at the near end, and refused past it."""

import numpy as np
import pytest

import magi_jax as mj
from magi_jax.testing.hostile_masks import FAMILIES, hostile_mask

FAR = 2**30 - 1  # rows of either axis: their sum is what int32 still holds
TILE = 2**22


@pytest.mark.parametrize("family", FAMILIES)
def test_algebra_and_tables_far_out(family, rng):
    """Everything about a mask in the last corner equals the same mask near the origin, moved."""
    size = 300
    near = hostile_mask(rng, size, size, family).mask
    offset = FAR - size
    far = near.shift(offset, offset, FAR, FAR)
    assert far.area == near.area
    assert far.crop((offset, FAR), (offset, FAR)) == near
    assert far.transpose().crop((offset, FAR), (offset, FAR)) == near.transpose()
    assert (far | far).same_cells(far)
    assert (far & mj.masks.full(FAR)).same_cells(far)

    # One tile at the end, of many; the same tile alone.
    start = (FAR - 1) // TILE * TILE
    length = FAR - start
    table = mj.slice_table(far, tile_size=TILE)
    alone = mj.slice_table(far.crop((start, FAR), (start, FAR)), tile_size=TILE)
    for walk, walk_alone in ((table.by_query, alone.by_query), (table.by_key, alone.by_key)):
        begin, end = walk.ptr[-2:]
        runs, runs_alone = walk.runs[begin:end], walk_alone.runs[: walk_alone.ptr[1]]
        np.testing.assert_array_equal(runs[:, :2] - start, runs_alone[:, :2])
        full = runs[:, 3] > runs[:, 2]
        np.testing.assert_array_equal(full, runs_alone[:, 3] > runs_alone[:, 2])
        np.testing.assert_array_equal(runs[full, 2:4] - start, runs_alone[full, 2:4])
    assert alone.q_len == length


def test_whole_far_masks_have_exact_areas():
    causal = mj.masks.causal(FAR)
    assert causal.area == FAR * (FAR + 1) // 2
    assert mj.masks.full(FAR).area == FAR**2
    window = mj.masks.local(FAR, window=(2**29, 0))
    assert window.area == causal.area - mj.masks.causal(FAR, offset=-(2**29) - 1).area
    diagonal = mj.AttnMask.from_slices([(0, FAR)], [(0, FAR)], [(FAR - 1, 2**62)], FAR)
    assert diagonal.area == 1
    assert mj.AttnMask.from_slices([(0, FAR)], [(0, FAR)], [(FAR, None)], FAR).area == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: mj.masks.causal(2**30, 2**30),
        lambda: mj.masks.full(2**31 - 1, 1),
        lambda: mj.masks.varlen([2**29, 2**29, 1]),
        lambda: mj.masks.empty(2**40),
        lambda: mj.AttnMask.from_slices([(0, 2**31)], [(0, 4)], 0, 2**31, 4),
        lambda: mj.masks.causal(8).shift(2**31, 0, 16, 16),
    ],
)
def test_lengths_past_int32_are_refused(make):
    with pytest.raises(ValueError, match=r"2147483647|leaves the sequence"):
        make()
