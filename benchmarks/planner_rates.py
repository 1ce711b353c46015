"""Fits the cost model's kernel rates to measured TFLOP/s by mask.

    python benchmarks/planner_rates.py

reads ``results/forward_sm90_h200.json`` and ``results/backward_sm90.json`` and prints rates by visible keys
per query row, rising, such that the time of a mask is the sum over its slices of area over rate. Only
sequences of 32,768 tokens and more are taken: shorter ones do not fill the device, a rank's share does.
"""

import json
from pathlib import Path

import numpy as np
from kernels import cases
from scipy.optimize import least_squares

from magi_jax.masks import bands

RESULTS = Path(__file__).parent / "results"
KEYS = (64, 256, 1024, 4096, 16384)
LEAST_TOKENS = 32768


def forward_rates() -> dict[tuple[str, int], float]:
    """Measured TFLOP/s of the forward pass by (mask, tokens)."""
    ours = json.loads((RESULTS / "forward_sm90_h200.json").read_text())["ours"]
    pairs = ((name.split("@"), rate) for name, rate in ours.items())
    return {(mask, int(tokens)): rate for (mask, tokens), rate in pairs}


def backward_rates() -> dict[tuple[str, int], float]:
    """Measured TFLOP/s of the backward pass by (mask, tokens)."""
    rows = json.loads((RESULTS / "backward_sm90.json").read_text())["rows"]
    return {(r["mask"], r["tokens"]): r["bwd_tflops"] for r in rows if "magi_jax" in r["peer"]}


def fit(measured: dict[tuple[str, int], float]) -> tuple[np.ndarray, float]:
    """Rates at `KEYS` and the largest relative error of a mask's time."""
    measured = {
        (mask.replace("swa_causal", "window"), tokens): rate
        for (mask, tokens), rate in measured.items()
        if tokens >= LEAST_TOKENS
    }
    slices = [cases(tokens)[mask].mask.slices for mask, tokens in measured]
    areas = [bands.area(rows) for rows in slices]
    keys = [
        a / (s[:, bands.Q_END] - s[:, bands.Q_START]) for s, a in zip(slices, areas, strict=True)
    ]

    def rates(steps):
        return np.cumsum(np.exp(steps))

    def errors(steps):
        return [
            np.log(np.sum(a / np.interp(np.log(k), np.log(KEYS), rates(steps))) * rate / a.sum())
            for a, k, rate in zip(areas, keys, measured.values(), strict=True)
        ]

    start = np.log(np.diff([0, 120, 300, 450, 550, 600]))
    found = least_squares(errors, start, bounds=(np.log(0.5), np.log(400))).x
    return rates(found), float(np.abs(np.expm1(errors(found))).max())


def main() -> None:
    """Prints both tables."""
    for name, measured in (("forward", forward_rates()), ("backward", backward_rates())):
        rates, error = fit(measured)
        points = ", ".join(f"({k}, {rate:.0f}.0)" for k, rate in zip(KEYS, rates, strict=True))
        print(f"{name}: {points}; the worst mask is off by {error:.1%}")


if __name__ == "__main__":
    main()
