"""Runs fuzz cases for a while and says what was tried; `make fuzz`.

    python tests/fuzz/fuzz.py --seconds 600                        # everything, in turn
    python tests/fuzz/fuzz.py --cases 10000 --only square,tiles    # a number of cases
    python tests/fuzz/fuzz.py --replay square:17                   # one case, with its traceback

Every case is a function of its name and seed. On a machine with a GPU, `--implementations` names
the kernels to compare; frames that they do not support are left out there.
"""

import argparse
import collections
import itertools
import random
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import virtual_devices  # noqa: E402

virtual_devices.prepare()

import fuzz_blocks  # noqa: E402
import fuzz_distributed  # noqa: E402
import fuzz_parts  # noqa: E402
import fuzz_single  # noqa: E402
import jax  # noqa: E402
import other_build  # noqa: E402

MAX_FAILURES_SHOWN = 20
# A frame of thousands of tokens takes as long as some hundred others.
WEIGHTS = {"thousands": 0.01, "gpu_thousands": 0.1}


def main() -> int:
    """Returns the exit status: 1 when a case failed."""
    args = _arguments()
    implementations = tuple(args.implementations.split(","))
    if args.extensions:
        other_build.use_extensions(args.extensions)
    if args.replay:
        name, seed = args.replay.split(":")
        print(name, seed, *_driver(name, implementations).run(int(seed)))
        return 0
    names = args.only.split(",") if args.only else _names(implementations)
    first = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"{len(names)} programs {', '.join(names)}; seeds from {first}", flush=True)
    tally = Tally()
    started = last = time.monotonic()
    drivers: dict = {}
    for name, seed in _schedule(names, first):
        now = time.monotonic()
        if now - started >= args.seconds or tally.cases >= args.cases:
            break
        if now - last > 60:
            print(f"  {now - started:.0f} s: {tally.cases} cases", flush=True)
            last = now
        if name not in drivers:
            drivers[name] = _driver(name, implementations)
        tally.run(drivers[name], name, seed)
    tally.report(time.monotonic() - started)
    for name, driver in drivers.items():
        for implementation, reason in getattr(driver, "refusals", {}).items():
            print(f"  {name} is refused by {implementation}: {reason}")
    return bool(tally.failures)


class Tally:
    """Counts of what was tried."""

    def __init__(self):
        self.cases = 0
        self.failures: list[str] = []
        self.names, self.families, self.kinds = (collections.Counter() for _ in range(3))

    def run(self, driver, name: str, seed: int) -> None:
        """Runs one case; a failure is printed with what repeats it."""
        self.cases += 1
        self.names[name] += 1
        try:
            family, kind = driver.run(seed)
        except Exception as error:
            self.failures.append(f"{name}:{seed}")
            if len(self.failures) <= MAX_FAILURES_SHOWN:
                print(f"FAILED {name}:{seed} {type(error).__name__}: {error}")
                print(f"  replay: python tests/fuzz/fuzz.py --replay {name}:{seed}", flush=True)
            return
        self.families[family] += 1
        self.kinds[kind] += 1

    def report(self, seconds: float) -> None:
        """Prints the counts."""
        survived = self.cases - len(self.failures)
        print(f"{self.cases} cases in {seconds:.0f} s, {survived} survived")
        for title, counts in (
            ("programs", self.names),
            ("masks", self.families),
            ("values", self.kinds),
        ):
            print(f"  {title}: " + ", ".join(f"{n} {c}" for n, c in sorted(counts.items())))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--cases", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--seed", type=int, help="first seed; drawn if not given")
    parser.add_argument("--only", help="names of frames and setups, comma-separated")
    parser.add_argument("--replay", metavar="NAME:SEED", help="run one case")
    default = "cpu,reference" if jax.default_backend() == "cpu" else "sm80,sm90"
    parser.add_argument("--implementations", default=default)
    parser.add_argument("--extensions", help="folder with the compiled modules to use")
    args = parser.parse_args()
    if args.seconds == args.cases == float("inf") and not args.replay:
        parser.error("say how long: --seconds or --cases")
    return args


def _names(implementations: tuple[str, ...]) -> list[str]:
    if "cpu" in implementations:
        frames = [*fuzz_single.FRAMES, *fuzz_blocks.BLOCKS, *fuzz_parts.PARTS]
        return [*frames, *fuzz_distributed.SETUPS]
    return [*fuzz_single.GPU_FRAMES, *fuzz_parts.GPU_PARTS]


def _driver(name: str, implementations: tuple[str, ...]):
    if name in fuzz_distributed.SETUPS:
        return fuzz_distributed.Distributed(name)
    if name in fuzz_blocks.BLOCKS:
        return fuzz_blocks.BlockTables(name, implementations)
    if name in fuzz_parts.PARTS | fuzz_parts.GPU_PARTS:
        return fuzz_parts.InParts(name, implementations)
    return fuzz_single.SingleDevice(name, implementations)


def _schedule(names: list[str], first: int):
    """All names in turn with rising seeds, the slow ones rarely."""
    due = dict.fromkeys(names, 0.0)
    for seed in itertools.count(first):
        for name in names:
            due[name] += WEIGHTS.get(name, 1.0)
            if due[name] >= 1.0 or seed == first:
                due[name] = 0.0
                yield name, seed


if __name__ == "__main__":
    sys.exit(main())
