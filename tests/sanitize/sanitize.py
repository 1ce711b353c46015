"""Builds the compiled modules with sanitizers and runs what reaches into them; `make sanitize`.

1. `_ffi` and `_planner` with the address and the undefined-behaviour sanitizer (g++), in build/sanitize.
2. The table fuzzer: libFuzzer where clang++ is found, else its own driver of random changes, both
   with the same sanitizers.
3. Fuzz cases of attention on the modules.
4. Tests of the FFI boundary, of all implementations and of the planner on them.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from table_corpus import write_corpus

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "sanitize"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
TESTS = (
    "tests/promises/test_ffi_boundary.py",
    "tests/ops/test_attention_conformance.py",
    "tests/ops/test_attention_refusals.py",
    "tests/solver",
    "tests/plan/test_make_plan.py",
)
FRAMES = "square,half,small_tiles,one_walk,tiles,one_key"
FUZZER_SOURCES = (
    "tests/sanitize/table_fuzzer.cc",
    "xla_ffi/common/table_check.cc",
    "xla_ffi/common/ffa_operands.cc",
    "xla_ffi/kernels/cpu/kernels.cc",
    "xla_ffi/kernels/cpu/dispatch.cc",
)


def main() -> int:
    """Returns how many of the steps failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=int, default=120, help="time of each fuzzer")
    parser.add_argument("--jobs", default="2", help="compilers at a time")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="what to give to pytest")
    parser.add_argument("--select", default="", help="as pytest's -k")
    args = parser.parse_args()
    build_modules(args.jobs)
    python = [sys.executable, "-m"]
    fuzz = [sys.executable, "tests/fuzz/fuzz.py", "--extensions", str(BUILD), "--only", FRAMES]
    # Without capture: what a sanitizer prints before it ends the process would be lost.
    pytest = [*python, "pytest", "-q", "-s", "-p", "other_build", "--extensions", str(BUILD)]
    steps = {
        "fuzzing slice tables": lambda: fuzz_tables(args.seconds),
        "fuzzing attention": lambda: run([*fuzz, "--seconds", str(args.seconds)], preload=True),
        "tests": lambda: run([*pytest, "-k", args.select, *args.tests], preload=True),
    }
    failed = 0
    for title, step in steps.items():
        print(f"== {title}, with the address and undefined-behaviour sanitizers", flush=True)
        status = step()
        print(
            f"== {title}: {'passed' if status == 0 else f'FAILED with status {status}'}", flush=True
        )
        failed += status != 0
    return failed


def run(command: list[str], preload: bool = False) -> int:
    """Runs a command in the root of the repository, with the sanitizer's runtime if asked for."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests"), *filter(None, [environment.get("PYTHONPATH")])]
    )
    if preload:
        # Python itself is not instrumented, so the runtime must be there before it. Its exceptions
        # need the C++ library to be there as well. Python's own leaks are not ours to report.
        libraries = (_library("libasan.so"), _library("libstdc++.so"))
        environment |= {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
        environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _library(name: str) -> str:
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def build_modules(jobs: str) -> None:
    """Configures and builds both modules; quick when nothing changed."""
    import pybind11

    configure = [_tool("cmake"), "-S", ".", "-B", str(BUILD), "-G", "Ninja"]
    configure += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DMAGI_JAX_CUDA=OFF"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", "-DCMAKE_CXX_COMPILER=g++"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"]
    subprocess.run(configure, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([_tool("ninja"), "-C", str(BUILD), "-j", jobs], cwd=ROOT, check=True)


def _tool(name: str) -> str:
    """A program of this environment, or of the system."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is needed; install it, or run make setup")
    return found


def fuzz_tables(seconds: int) -> int:
    """Builds and runs `table_fuzzer.cc`."""
    import jax.ffi

    corpus = write_corpus(BUILD / "corpus")
    clang = shutil.which("clang++") or shutil.which("clang++-14")
    fuzzer = BUILD / ("table_fuzzer" if clang else "table_driver")
    command = [clang or "g++", "-std=c++17", "-g", "-O1", *FLAGS.split(), "-o", str(fuzzer)]
    command += ["-fsanitize=fuzzer"] if clang else ["-DMAGI_JAX_RANDOM_DRIVER"]
    command += ["-DMAGI_JAX_ISA=portable", "-Wno-psabi", "-I.", "-isystem", jax.ffi.include_dir()]
    subprocess.run([*command, *FUZZER_SOURCES], cwd=ROOT, check=True)
    if clang:
        found = BUILD / "found"
        found.mkdir(exist_ok=True)
        limits = [
            f"-max_total_time={seconds}",
            "-max_len=16384",
            "-timeout=20",
            "-print_final_stats=1",
        ]
        return run([str(fuzzer), *limits, str(found), str(corpus[0].parent)])
    print("clang++ was not found: random changes of tables, not guided by coverage", flush=True)
    return run([str(fuzzer), str(2000 * seconds), "1", *map(str, corpus)])


if __name__ == "__main__":
    sys.exit(main())
