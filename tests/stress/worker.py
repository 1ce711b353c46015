"""One process of a job that trains, and can go wrong on request; started by `job.py`."""

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import jax


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--devices", type=int, default=2, help="devices of this process")
    parser.add_argument("--initialization", type=int, default=60, help="seconds until all came")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--heartbeat", type=int, default=15, help="seconds until a dead process counts"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="read at the start, written after each step"
    )
    parser.add_argument("--sleep-at", type=int, help="this process sleeps before this step")
    parser.add_argument("--sleep", type=float, default=4.0)
    parser.add_argument("--other-plan-at", type=int, help="this process plans something else there")
    parser.add_argument("--other-version", action="store_true", help="pretend another version")
    return parser.parse_args()


def main() -> None:
    args = flags()
    # No worker outlives the test, even where that is killed itself.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)  # most of so short a job is compiling
    jax.config.update("jax_num_cpu_devices", args.devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    os.environ["PJRT_NPROC"] = str(2 * args.devices)
    if args.processes > 1:
        jax.distributed.initialize(
            args.coordinator,
            args.processes,
            args.process,
            initialization_timeout=args.initialization,
            heartbeat_timeout_seconds=args.heartbeat,
            shutdown_timeout_seconds=args.heartbeat,
        )
    train(args)


def train(args: argparse.Namespace) -> None:
    import numpy as np
    import tiny_training as tiny
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import magi_jax as mj

    if args.other_version:
        mj.__version__ = "0.0.0+other"
    cp_size = jax.device_count()
    mesh = jax.make_mesh((cp_size,), ("cp",), (AxisType.Auto,))
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("cp"))
    weights, done = tiny.initial_weights(), 0
    if args.checkpoint and args.checkpoint.exists():
        with np.load(args.checkpoint) as saved:
            weights, done = {n: saved[n] for n in weights}, int(saved["step"])
    weights = mj.data.place(weights, everywhere)
    step, spec = tiny.make_step(mesh), tiny.shared_spec(cp_size)
    for number in range(done + 1, args.steps + 1):
        if number == args.sleep_at:
            time.sleep(args.sleep)
        seed = number + 1000 * (number == args.other_plan_at)
        plan = mj.make_plan(tiny.mask_of(tiny.packing(seed)), cp_size, tiny.CONFIG, spec)
        mj.data.check_same_plans([plan])
        x = mj.dispatch(tiny.tokens(number), plan)
        weights, loss, _ = step(weights, *mj.data.place((x, plan), rows))
        print(f"step {number} loss {float(loss):.7f}", flush=True)
        if args.checkpoint and args.process == 0:
            partial = args.checkpoint.with_suffix(".partial.npz")
            np.savez(partial, step=number, **{n: np.asarray(w) for n, w in weights.items()})
            partial.replace(args.checkpoint)


if __name__ == "__main__":
    sys.exit(main())
