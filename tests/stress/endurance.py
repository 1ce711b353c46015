"""Thousands of distinct packings through one jitted training step; `make stress`.

    python tests/stress/endurance.py --packings 5000

On a machine with GPUs it runs over these, up to four, in bfloat16.

Watches what must not move: the number of compilations, the arrays that are alive, resident memory,
and the distance of the attention's result to the float64 oracle, relative to its size, at random check
points.
"""

import argparse
import dataclasses
import gc
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import virtual_devices

if __name__ == "__main__":
    virtual_devices.prepare()

import jax
import numpy as np
import tiny_training as tiny
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.testing import oracle

MOST_RANKS = 4


@dataclasses.dataclass
class Report:
    """What was seen. Memory is resident, after the first tenth of the run and at its end."""

    packings: int
    distinct: int
    compilations: int
    live_arrays: tuple[int, int]
    memory_mib: tuple[float, float]
    checks: int
    largest_errors: tuple[float, float]  # in the first and the second half of the checks
    tolerance: float
    ranks: int
    seconds: float

    def problems(self) -> list[str]:
        """What should not be."""
        found = []
        if self.distinct != self.packings:
            found.append(f"only {self.distinct} packings of {self.packings} are distinct")
        if self.compilations != 1:
            found.append(f"the step was compiled {self.compilations} times")
        if self.live_arrays[1] > self.live_arrays[0]:
            found.append("arrays alive went from {} to {}".format(*self.live_arrays))
        if self.memory_mib[1] > self.memory_mib[0] * 1.02 + 8:
            found.append("resident memory went from {:.0f} to {:.0f} MiB".format(*self.memory_mib))
        if max(self.largest_errors) > self.tolerance:
            found.append(f"errors against the oracle are up to {max(self.largest_errors):.2g}")
        return found


def run(num_packings: int, num_checks: int, first_seed: int, progress=None) -> Report:
    """Trains on as many packings, none of which is there twice."""
    model = tiny.FOR_CUDA if jax.default_backend() == "gpu" else tiny.SMALL
    devices = jax.devices()[:MOST_RANKS]
    spec = tiny.shared_spec(len(devices))
    mesh = jax.make_mesh((len(devices),), ("cp",), (AxisType.Auto,), devices=devices)
    step = tiny.make_step(mesh, model)
    rng = np.random.default_rng(first_seed)
    # Where the step leaves them, so that the second step finds the first one's program.
    weights = jax.device_put(tiny.initial_weights(model), NamedSharding(mesh, P()))
    checked = set(rng.choice(num_packings, min(num_checks, num_packings), replace=False).tolist())
    rows = NamedSharding(mesh, P("cp"))
    seen, errors, started = set(), [], time.monotonic()
    seed, done, start = first_seed, 0, (0, 0.0)
    while done < num_packings:
        lengths, seed = tiny.packing(seed), seed + 1
        if (key := lengths.tobytes()) in seen:
            continue
        seen.add(key)
        plan = mj.make_plan(tiny.mask_of(lengths), len(devices), tiny.CONFIG, spec)
        x = tiny.tokens(seed, model)
        before = jax.tree.map(np.asarray, weights) if done in checked else None
        placed = jax.device_put((mj.dispatch(x, plan), plan), rows)
        weights, _, out = step(weights, *placed)
        if before is not None:
            out = mj.undispatch(np.asarray(out), plan)
            errors.append(_distance_to_oracle(x, before, lengths, out, model))
        done += 1
        if done == max(num_packings // 10, 1):
            start = (_live(weights), _resident_mib())
        if progress and done % max(num_packings // 20, 1) == 0:
            progress(done, _resident_mib(), max(errors, default=0.0))
    half = len(errors) // 2
    return Report(
        num_packings,
        len(seen),
        step._cache_size(),
        (start[0], _live(weights)),
        (start[1], _resident_mib()),
        len(errors),
        (max(errors[:half], default=0.0), max(errors[half:], default=0.0)),
        model.tolerance,
        len(devices),
        time.monotonic() - started,
    )


def _distance_to_oracle(x, weights, lengths, out, model: tiny.Model) -> float:
    """Largest distance, as a share of the largest value that is expected."""
    q, k, v = tiny.project(x.astype(np.float64), weights, model)
    expected, _ = oracle.attention(q, k, v, tiny.mask_of(lengths).dense())
    return float(np.abs(out - expected).max() / np.abs(expected).max())


def _live(weights) -> int:
    jax.block_until_ready(weights)
    gc.collect()  # an array in a cycle waits for the collector, whoever left it there
    return len(jax.live_arrays())


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> int:
    """Returns 1 when something moved that must not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packings", type=int, default=5000)
    parser.add_argument("--checks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"{args.packings} packings from seed {args.seed}", flush=True)

    def progress(done, memory, error):
        print(f"  {done}: {memory:.0f} MiB resident, largest error {error:.2g}", flush=True)

    report = run(args.packings, args.checks, args.seed, progress)
    for field in dataclasses.fields(report):
        print(f"  {field.name}: {getattr(report, field.name)}")
    for problem in report.problems():
        print(f"FAILED: {problem}")
    return bool(report.problems())


if __name__ == "__main__":
    sys.exit(main())
