"""Shares and sketches of masks are those of their dense arrays."""

import numpy as np
import pytest

from magi_jax import masks
from magi_jax.testing.cases import random_mask


def shares_of(dense, rows, columns):
    """Block by block, straight from the cells."""
    (q_len, k_len), shares = dense.shape, np.zeros((rows, columns))
    for i, j in np.ndindex(rows, columns):
        q = slice(q_len * i // rows, q_len * (i + 1) // rows)
        k = slice(k_len * j // columns, k_len * (j + 1) // columns)
        shares[i, j] = dense[q, k].mean() if dense[q, k].size else 0
    return shares


@pytest.mark.parametrize("seed", range(12))
def test_coverage_of_random_masks(seed):
    rng = np.random.default_rng(seed)
    q_len, k_len, rows, columns = rng.integers(1, [50, 50, 60, 60])
    mask = random_mask(rng, q_len, k_len)
    wanted = shares_of(mask.dense(), rows, columns)
    np.testing.assert_allclose(mask.coverage(rows, columns), wanted, rtol=1e-12)


def test_coverage_by_cells_is_the_mask():
    mask = masks.varlen([700, 800]) | masks.global_rows(1500, rows=(3, 5))
    np.testing.assert_array_equal(mask.coverage(1500), mask.dense())  # two million blocks of a cell


def test_frames_of_a_long_clip_see_their_window_and_the_first():
    frames, window = 40, 8
    mask = masks.uniform_block_causal(
        [frames * 1560], block=1560, window=(window, 0), global_prefix=1
    )
    q, k = np.arange(frames)[:, None], np.arange(frames)[None]
    sees = (k <= q) & ((q - k <= window) | (k == 0))
    np.testing.assert_array_equal(mask.coverage(frames), sees)
    wanted = ["".join("##" if seen else ".." for seen in row) for row in sees]
    assert mask.sketch(frames).splitlines() == wanted


def test_a_sketch_shows_parts_and_keeps_blocks_square():
    assert masks.causal(4).sketch(2) == "++..\n##++"
    assert masks.full(2, 6).sketch(2) == "########\n########"  # four columns at most
    assert masks.full(64, 2).sketch(4) == "\n".join(["##"] * 4)
    assert masks.empty(3).sketch() == "\n".join(["......"] * 3)
    assert masks.empty(0).sketch() == ".."


@pytest.mark.parametrize(
    "call",
    [
        lambda: masks.causal(4).coverage(0),
        lambda: masks.causal(4).coverage(2, -1),
        lambda: masks.causal(4).sketch(0),
    ],
)
def test_no_parts_are_refused(call):
    with pytest.raises(ValueError, match=r"(rows|columns) must be at least 1; got (0|-1)"):
        call()
