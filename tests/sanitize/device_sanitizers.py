"""Runs the CUDA kernels under compute-sanitizer, called directly and by JAX; on a machine with a GPU.

    python tests/sanitize/device_sanitizers.py --build BUILD [--tools memcheck ...] [--json FILE]

BUILD is a folder in which the extension was built with its CUDA kernels (``build/cp312-...``). Directly: a
small program linked with the object files there runs the problems of `device_problems.py`, one process for
each, and its results are compared with the oracle. By JAX: fuzz cases in one process. Sanitizers are
memcheck, racecheck, synccheck and initcheck; nothing is filtered but JAX's own kernels under the first three.
racecheck wants a build with ``MAGI_JAX_CUDA_FLAGS=-DMAGI_JAX_EVERY_LANE_ARRIVES``: it follows an mbarrier
only from the lanes that arrive, where otherwise one of a warp arrives for all.
"""

import argparse
import collections
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import device_problems

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from provenance import save  # noqa: E402

TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")
PATHS = ("sm80", "sm90", "sm90_ordered")
FRAMES = "gpu_square,gpu_wide,gpu_tall"
KERNELS = "kns=magi_jax"  # part of the names of ours


class Run(NamedTuple):
    """One process under one sanitizer; ``problem`` is None for JAX's."""

    tool: str
    path: str
    problem: str | None


def main() -> int:
    """Returns how many runs did not end as they should or had errors; hazards do not count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=Path, required=True, help="build folder with CUDA kernels")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--problems", nargs="*", default=list(device_problems.cases()))
    parser.add_argument("--jax-cases", type=int, default=3, help="fuzz cases by JAX; 0 for none")
    parser.add_argument("--seconds", type=float, default=60, help="limit of each process")
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sanitize_device")
    parser.add_argument("--commit", help="commit of a tree without git")
    parser.add_argument("--json", type=Path, help="where to write the findings")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    driver = build_driver(args.build, args.out)
    cases = {name: device_problems.cases()[name] for name in args.problems}
    operands = {name: device_problems.Operands(case) for name, case in cases.items()}
    for name, case in cases.items():
        device_problems.write(case, operands[name], args.out / f"{name}.problem")

    def run(job: Run) -> dict:
        found = execute(job, driver, args)
        if job.problem is not None and found["ended"] == "0":
            results = args.out / f"{_stem(job)}.results"
            found["wrong"] = device_problems.check(
                cases[job.problem], operands[job.problem], results
            )
            results.unlink()
        print(describe(job, found), flush=True)
        return {**job._asdict(), **found}

    problems = [*([None] if args.jax_cases else []), *args.problems]  # the longest first
    rows: list[dict] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for tool in args.tools:
            jobs = [
                Run(tool, path, problem)
                for path in args.paths
                for problem in problems
                if path != "sm80" or problem is None or not cases[problem].short_dq
            ]
            rows += pool.map(run, jobs)
            if args.json:
                save(args.json, args.commit, {"sanitizer": _version(), "rows": rows})
    print_table(rows)
    return sum(map(is_bad, rows))


def is_bad(row: dict) -> bool:
    """Hazards are for people to judge: racecheck does not see all that mbarriers order."""
    errors = row["tool"] != "racecheck" and row["errors"] != 0
    return row["ended"] != "0" or bool(row["wrong"]) or errors


def build_driver(build: Path, out: Path) -> Path:
    """Links `device_driver.cc` with the kernels of a build of the extension."""
    cache = (build / "CMakeCache.txt").read_text()
    runtime, include = (
        re.search(rf"^MAGI_JAX_{name}:\w+=(.*)$", cache, re.MULTILINE)[1]
        for name in ("CUDART", "CUDA_INCLUDE")
    )
    objects = sorted(str(path) for path in (build / "cuda").glob("sm[89]0_*.o"))
    if not objects:
        raise FileNotFoundError(f"{build / 'cuda'} has no object files of kernels")
    driver = out / "device_driver"
    command = ["g++", "-std=c++17", "-O1", f"-I{ROOT}", "-isystem", include, "-o", str(driver)]
    if any("/sm90_" in name for name in objects):
        command.append("-DMAGI_JAX_WITH_SM90")
    source = str(ROOT / "tests" / "sanitize" / "device_driver.cc")
    subprocess.run([*command, source, *objects, runtime, "-lpthread", "-ldl", "-lrt"], check=True)
    return driver


def execute(job: Run, driver: Path, args) -> dict:
    """How a process ended and what its sanitizer said; all it printed is kept in the folder."""
    command = ["compute-sanitizer", "--tool", job.tool, "--print-limit", "5000"]
    # What kernels inside a CUDA graph write is unknown to initcheck, so no graphs.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_FLAGS=flags.strip())
    if job.problem is not None:
        files = (args.out / f"{job.problem}.problem", args.out / f"{_stem(job)}.results")
        command += [str(driver), job.path, *map(str, files)]
    else:
        # initcheck knows only what the kernels that it watches have written.
        command += [] if job.tool == "initcheck" else ["--kernel-name", KERNELS]
        command += [sys.executable, "tests/fuzz/fuzz.py", "--seed", "5", "--only", FRAMES]
        command += ["--cases", str(args.jax_cases), "--implementations", job.path]
    log = args.out / f"{_stem(job)}.log"
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
                timeout=args.seconds, check=False,
            )  # fmt: skip
            ended = str(done.returncode)
        except subprocess.TimeoutExpired:
            ended = f"stopped after {args.seconds:.0f} s"
    return {"ended": ended, "wrong": "", **read(log.read_text(errors="replace"))}


def read(text: str) -> dict:
    """What a sanitizer printed, in short.

    Returns:
        ``errors`` and ``warnings`` as its last summary says, None and 0 where there is none; ``kinds``, how
        often it reported what at which line; ``survived``, of the fuzz cases.
    """
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    races = re.findall(r"RACECHECK SUMMARY: .*?\((\d+) errors?, (\d+) warn", text)
    survived = re.search(r"(\d+) cases in \d+ s, (\d+) survived", text)
    return {
        "errors": int(races[-1][0]) if races else int(errors[-1]) if errors else None,
        "warnings": int(races[-1][1]) if races else 0,
        "kinds": dict(collections.Counter(_reports(text)).most_common(40)),
        "survived": f"{survived[2]} of {survived[1]}" if survived else "",
    }


def _reports(text: str) -> Iterator[str]:
    """A line for each report: what, and where; for a race, each pair of accesses as often as it was seen."""
    lines = [
        line.removeprefix("=========") for line in text.splitlines() if line.startswith("=====")
    ]
    for line, following in itertools.pairwise([*lines, ""]):
        if race := re.match(
            r" (?:Error|Warning): Race reported between (\w+) access at (.*)", line
        ):
            first = f"race: {race[1].lower()} at {_place(race[2])}"
        elif pair := re.match(r"     and (\w+) access at (.*) \[(\d+) hazards?\]", line):
            yield from [f"{first}, {pair[1].lower()} at {_place(pair[2])}"] * int(pair[3])
        elif re.match(r"      ?at ", following) and re.match(r" \w", line):
            yield f"{line.strip()}: at {_place(following.strip().removeprefix('at '))}"
        elif re.match(r" (?:Program hit|Error:|Internal)", line):
            yield re.sub(r"0x[0-9a-f]+", "", line.strip())


def _place(text: str) -> str:
    """A function without namespaces, templates and arguments, and the line of its file."""
    name, plain = text, None
    while name != plain:
        plain, name = name, re.sub(r"<[^<>]*>", "", name)
    name = re.split(r"[(+]", name)[0].split()[-1].replace("magi_jax::", "")
    inside = re.search(r" in ([\w.]+:\d+)$", text)
    return f"{name} {inside[1]}" if inside else name


def _stem(job: Run) -> str:
    return f"{job.tool}_{job.path}_{job.problem or 'jax'}"


def describe(job: Run, found: dict) -> str:
    """One line."""
    text = f"{_stem(job):44} ended {found['ended']}, errors {found['errors']}"
    text += f", warnings {found['warnings']}" if found["warnings"] else ""
    text += f", survived {found['survived']}" if found["survived"] else ""
    return text + (f", WRONG: {found['wrong']}" if found["wrong"] else "")


def print_table(rows: list[dict]) -> None:
    """Errors by tool, path and way, then each kind of report once."""
    for row in rows:
        for kind, count in row["kinds"].items():
            print(f"{_stem(Run(row['tool'], row['path'], row['problem']))}: {count} x {kind}")


def _version() -> str:
    found = subprocess.run(
        ["compute-sanitizer", "--version"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
