"""Fits the cost model's kernel rates to timed calls of ranks.

    python benchmarks/scaling time                 # on a GPU; writes both files that are read here
    python benchmarks/planner_rates.py

reads the calls that ``scaling prepare`` chose and the times that ``scaling time`` found for them, and prints
rates by visible keys per query row, rising, such that the time of a call is the sum over its slices of area
over rate, a constant, and in the forward pass the rows that it merges with those of earlier calls.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scaling.orders import load_orders
from scaling.work import FLOPS_PER_PAIR, HEAD_DIM, NUM_HEADS, Piece
from scipy.optimize import least_squares

from magi_jax.masks import bands
from magi_jax.solver.cost.model import MERGE_TILE

ROOT = Path(__file__).parents[1]
KEYS = (64, 256, 1024, 4096, 16384)
FAR = 0.3  # of the logarithm of a time to the fit: the host was held up
START = (*np.log(np.diff([0, 120, 300, 450, 550, 600])), np.log(20.0), np.log(0.03))


def merged_rows(piece: Piece) -> int:
    """Rows of the query tiles in which a call adds to earlier results."""
    if piece.result != "merged":
        return 0
    begin = piece.slices[:, bands.Q_START] // MERGE_TILE
    end = -(-piece.slices[:, bands.Q_END] // MERGE_TILE)
    tiles = [np.arange(*ends) for ends in zip(begin, end, strict=True)]
    return MERGE_TILE * len(np.unique(np.concatenate(tiles)))


def fit(pieces: list[Piece], times_us: np.ndarray, which: str) -> tuple[np.ndarray, np.ndarray]:
    """Rates at `KEYS`, the constant and microseconds per merged row ``[7]``; and relative errors of calls."""
    slices = [piece.slices.astype(np.int64) for piece in pieces]
    areas = [bands.area(rows) for rows in slices]
    area, call = np.concatenate(areas), np.repeat(np.arange(len(areas)), [len(a) for a in areas])
    rows = np.concatenate([s[:, bands.Q_END] - s[:, bands.Q_START] for s in slices])
    log_keys = np.log(np.maximum(area / rows, 1))
    flops = area * FLOPS_PER_PAIR[which] * NUM_HEADS * HEAD_DIM / 1e6
    merged = np.array([merged_rows(piece) for piece in pieces]) * (which == "forward")

    def off(steps: np.ndarray) -> np.ndarray:
        rates = np.interp(log_keys, np.log(KEYS), np.cumsum(np.exp(steps[:5])))
        kernel_us = np.bincount(call, flops / rates, len(pieces))
        return np.log((kernel_us + np.exp(steps[5]) + np.exp(steps[6]) * merged) / times_us)

    found, near = np.array(START), np.ones(len(pieces), bool)
    for _ in range(3):
        found = least_squares(
            lambda steps, near=near: off(steps)[near], found,
            bounds=(np.log(1e-3), np.log(400)), loss="soft_l1", f_scale=0.05,
        ).x  # fmt: skip
        near = np.abs(off(found)) < FAR
    values = np.exp(found)
    return np.append(np.cumsum(values[:5]), values[5:]), np.abs(np.expm1(off(found)))


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pieces", type=Path, default=ROOT / "outputs" / "scaling_pieces.npz")
    parser.add_argument(
        "--kernels", type=Path, default=ROOT / "benchmarks" / "results" / "scaling_kernels.json"
    )
    args = parser.parse_args()
    for path in (args.pieces, args.kernels):
        if not path.exists():
            parser.error(f"{path} is not there: `benchmarks/scaling time` on a GPU makes it")
    pieces = {key: order.piece for key, order in load_orders(args.pieces).items()}
    timed = json.loads(args.kernels.read_text())["pieces"]
    for which in FLOPS_PER_PAIR:
        known = [
            k for k in timed if k in pieces and which in timed[k] and pieces[k].heads == NUM_HEADS
        ]
        if not known:
            parser.error(
                f"{args.kernels} has no time of a {which} pass of the pieces of {args.pieces}"
            )
        times_us = np.array([timed[k][which] for k in known])
        (*rates, constant, per_row), errors = fit([pieces[k] for k in known], times_us, which)
        points = ", ".join(f"({k}, {rate:.0f}.0)" for k, rate in zip(KEYS, rates, strict=True))
        half, most = np.percentile(errors, [50, 95])
        print(
            f"{which}: {points}; {constant:.0f} us a call, {per_row:.4f} us a merged row;"
            f" {len(known)} calls, off by {half:.1%} in the median, {most:.1%} at the 95th percentile"
        )


if __name__ == "__main__":
    main()
