"""How long a kernel call should take, from what its table makes it walk; fitted to calls that were timed."""

from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from magi_jax.masks import bands
from magi_jax.solver import slice_table
from scaling.work import ADDING, FLOPS_PER_PAIR, HEAD_DIM, Piece

PROCESSORS = 132  # of an H100 or H200
# TFLOP/s on cells that are walked, before anything was timed.
FIRST_TFLOPS = {"forward": 600.0, "backward": 500.0}


class Fit(NamedTuple):
    """Microseconds of a call as a sum of features, and how far off it is on what it was fitted to.

    Attributes:
        weights: of each feature, by pass.
        errors: 50th and 95th percentile of the relative error, by pass.
    """

    weights: dict[str, np.ndarray]
    errors: dict[str, tuple[float, float]]

    def microseconds(self, features: np.ndarray, which: str) -> np.ndarray:
        """Predicted times of features ``[pieces, 16]``."""
        return features @ self.weights[which]


def features(piece: Piece) -> np.ndarray:
    """``[16]``: one; rows of queries and of keys, times heads; then of the walk of query tiles and of that of
    key tiles five each, as `_walk` lists them; at last what kinds of results take: rows of queries of a call
    that is alone, those of the first of several, and query tiles of one that adds to others.
    """
    slices = piece.slices.astype(np.int64)
    share = piece.heads / PROCESSORS / 128
    rows = [piece.q_len * share, piece.k_len * piece.kv_heads / PROCESSORS / 128]
    by_query = _walk(slices, piece.q_len, share)
    kinds = [
        rows[0] * (piece.result == "final"),
        rows[0] * (piece.result == "first"),
        by_query[2] * (piece.result in ADDING),
    ]
    by_key = _walk(bands.transpose(slices), piece.k_len, share)
    return np.array([1.0, *rows, *by_query, *by_key, *kinds])


def _walk(slices: np.ndarray, length: int, share: float) -> list[float]:
    """Cells that are walked, those under a mask, tiles, slices looked up; the longest tile.

    Cells are those of 128-row tiles in units of a 128 x 128 block; all but the last are times heads over
    processors.
    """
    engine = slice_table.ENGINES["compiled"]
    walk = engine(slices, np.zeros(len(slices), np.int64), 1, length, 128)
    count = int(walk.ptr[0, -1])
    runs = walk.runs[0, :count].astype(np.float64)
    walked = runs[:, 1] - runs[:, 0]
    tile = np.repeat(np.arange(walk.ptr.shape[1] - 1), np.diff(walk.ptr[0]))
    longest = np.bincount(tile, walked).max(initial=0.0) / 128
    masked = walked - (runs[:, 3] - runs[:, 2])
    tiles = np.count_nonzero(np.diff(walk.ptr[0])) * 128
    looked_up = (runs[:, 5] - runs[:, 4]).sum() * 128
    return [*(x * share for x in (walked.sum(), masked.sum(), tiles, looked_up)), longest]


def first_fit() -> Fit:
    """What to go by before anything was timed."""
    weights = {}
    for which, tflops in FIRST_TFLOPS.items():
        block_us = FLOPS_PER_PAIR[which] * 128 * 128 * HEAD_DIM / (tflops * 1e6) * PROCESSORS
        weights[which] = np.array([8.0, 0, 0, block_us, 0.3 * block_us, 1.0, *np.zeros(10)])
    return Fit(weights, {which: (0.0, 0.0) for which in weights})


def fit(timed: dict[str, list[tuple[np.ndarray, float]]]) -> Fit:
    """Least squares of relative errors with weights that are not negative.

    Args:
        timed: features and microseconds of the timed pieces, by pass.
    """
    weights, errors = {}, {}
    for which, points in timed.items():
        if not points:
            raise ValueError(
                f"no {which} pass of these problems was timed, so nothing can be fitted"
            )
        table, times = (np.array(column) for column in zip(*points, strict=True))
        weights[which], _ = nnls(table / times[:, None], np.ones(len(times)))
        off = np.abs(table @ weights[which] / times - 1)
        errors[which] = tuple(float(x) for x in np.percentile(off, [50, 95]))
    return Fit(weights, errors)
