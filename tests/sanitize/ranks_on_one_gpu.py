"""Builds and runs ranks_on_one_gpu.cu: group casts between ranks that share one GPU.

    python tests/sanitize/ranks_on_one_gpu.py [--count N] [--tool memcheck] [--architecture 90a]

One GPU shows pointers, signals, leases and the order of a call, and what becomes of a rank that comes too
late; of links it shows nothing.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = ("cast.cu", "own_rows.cu", "push.cu", "reduce_lse.cu", "reduce_sum.cu")
SOURCES = (*KERNELS, "pool.cc", "pool_calls.cc", "pool_failure.cc")


def main() -> int:
    """Returns how many cases went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="random transfers of each kind")
    parser.add_argument("--seed", type=int, nargs="*", default=[], help="of the transfers")
    parser.add_argument("--tool", help="a tool of compute-sanitizer to run it under")
    parser.add_argument("--architecture", default="90a")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--build", type=Path, help="build this program and do not run it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = args.build or Path(folder) / "ranks_on_one_gpu"
        build(args.nvcc, args.architecture, program)
        if args.build:
            return 0
        tool = ["compute-sanitizer", "--tool", args.tool] if args.tool else []
        command = [*tool, program, args.count, int(not args.tool), *args.seed]
        return subprocess.run([str(word) for word in command], check=False).returncode


def build(nvcc: str, architecture: str, program: Path) -> None:
    """Compiles the driver with the kernels that it runs."""
    sources = [ROOT / "xla_ffi" / "comm" / name for name in SOURCES]
    target = f"arch=compute_{architecture},code=sm_{architecture}"
    command = [nvcc, "-std=c++20", "-O3", "-lineinfo", f"-I{ROOT}", "-gencode", target]
    command += [Path(__file__).with_suffix(".cu"), *sources, "-o", program]
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    sys.exit(main())
