"""Writes docs/results.md from the stored results, or prints a short table of one of them.

    python benchmarks/report.py                    # make bench-report
    python benchmarks/report.py --kernels FILE     # the table of a kernels.py run

A section whose result is not stored says with which command it is made. Losses are listed beside gains.
"""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import report_ranks
import report_scaling
import report_sections as write
from provenance import RESULTS, ROOT
from report_summary import summary
from report_tables import Machines

# Files that have a line of their own at the top of the page, and of which kind.
SUMMED_UP = {
    "kernels_gpu.json": "each_peer",
    "kernels_64_gpu.json": "kernels",
    "kernels_flash_gpu.json": "each_peer",
    "kernels_peers_gpu.json": "kernels",
    "distributed_h200.json": "distributed",
    "rivals_h200.json": "rivals",
    "scaling.json": "scaling",
    "scaling_check.json": "check",
    "scaling_granted.json": "granted",
    "recompilation_gpu.json": "compiles",
    "cpu_kernels.json": "cpu_kernels",
}
PAGE = ROOT / "docs" / "results.md"
HEADER = """# Results

`make bench-report` writes this page from `benchmarks/results/*.json`. Each section names the machine (listed
at the end), the commit and the command of its figures, and lists where others are ahead. On GPUs the figures
are of one H200, or of two where a section says so; nothing here ran on more, and what is said of 8 to 64
ranks is simulated from kernels that were timed on one. Compare figures of one table, not of two: cards
differ, and so does their pace. Kernels of a CPU ran alone on theirs, its other figures beside other work.
FlashAttention 3 and 4 can be called from JAX by packages of others (`dew-flash-attn-cu13`, `fa4-jax`); a
section compares with them on one card. The kernels of MagiAttention cannot:
[Kernels](kernels/backward_measured.md) compares with their figures on another such card.

To run all of it again on a machine with GPUs: `sh benchmarks/on_gpu.sh` for one GPU, `sh
benchmarks/on_node.sh` for several. TFLOP/s are those of the mask's area everywhere: 4 * area * heads * head
dim forward, 2.5 times that for the gradients alone.
"""


class Section(NamedTuple):
    """A part of the page: how it is called, which result it shows, what makes that, and what writes it."""

    title: str
    name: str
    command: str
    write: Callable[[dict], list[str]]


SECTIONS = (
    Section(
        "Kernels on one GPU", "kernels_gpu.json", "python benchmarks/kernels.py", write.kernels
    ),
    Section(
        "Kernels on one GPU, head dim 64",
        "kernels_64_gpu.json",
        "python benchmarks/kernels.py --head-dims 64",
        write.kernels,
    ),
    Section(
        "Kernels on one GPU, beside FlashAttention 3 and 4",
        "kernels_flash_gpu.json",
        "python benchmarks/kernels.py --head-dims 128 --peers fa3_jax fa3 fa4_jax",
        write.kernel_peers,
    ),
    Section(
        "Kernels on one GPU, beside tokamax and PyTorch",
        "kernels_peers_gpu.json",
        "python benchmarks/kernels.py --head-dims 128 --lengths 8192 32768",
        write.kernel_peers,
    ),
    Section(
        "Two GPUs beside one",
        "distributed_h200.json",
        "python benchmarks/distributed.py --busy",
        report_ranks.distributed,
    ),
    Section(
        "Two GPUs, beside other strategies",
        "rivals_h200.json",
        "python benchmarks/rivals.py --tokens 32768",
        report_ranks.rivals,
    ),
    Section(
        "Group collectives between two GPUs",
        "collectives_h200.json",
        "python benchmarks/collectives.py",
        report_ranks.collectives,
    ),
    Section(
        "8 to 64 GPUs, simulated",
        "scaling.json",
        "python benchmarks/scaling simulate",
        report_scaling.scaling,
    ),
    Section(
        "The model against real GPUs",
        "scaling_check.json",
        "python benchmarks/scaling check",
        report_scaling.check,
    ),
    Section(
        "The model against real GPUs, other strategies",
        "scaling_granted.json",
        "python benchmarks/scaling granted",
        report_scaling.granted,
    ),
    Section(
        "Recompilation, CPU",
        "recompilation_cpu.json",
        "python benchmarks/recompilation.py",
        write.compiles,
    ),
    Section(
        "Recompilation, GPU",
        "recompilation_gpu.json",
        "python benchmarks/recompilation.py",
        write.compiles,
    ),
    Section(
        "Recompilation, GPU, 32,768 tokens",
        "recompilation_32k_gpu.json",
        "python benchmarks/recompilation.py --seq-len 32768",
        write.compiles,
    ),
    Section(
        "Kernels on a CPU",
        "cpu_kernels.json",
        "python benchmarks/cpu_kernels.py",
        write.cpu_kernels,
    ),
    Section(
        "Kernels on a CPU, bfloat16",
        "cpu_kernels_bf16.json",
        "python benchmarks/cpu_kernels.py --dtypes bfloat16",
        write.cpu_kernels,
    ),
    Section("Memory", "memory_gpu.json", "python benchmarks/memory.py", write.memory),
    Section("Planner", "planner_fast.json", "python benchmarks/planner.py", write.planner),
    Section(
        "Planner, high effort",
        "planner_high.json",
        "python benchmarks/planner.py --effort high",
        write.planner,
    ),
    Section(
        "Device kernels under sanitizers",
        "device_sanitizers.json",
        "python tests/sanitize/device_sanitizers.py --build BUILD",
        write.sanitizers,
    ),
    Section(
        "Device kernels of which every lane arrives at barriers, under racecheck",
        "device_racecheck.json",
        "python tests/sanitize/device_sanitizers.py --build BUILD --tools racecheck synccheck"
        " (built with MAGI_JAX_CUDA_FLAGS=-DMAGI_JAX_EVERY_LANE_ARRIVES)",
        write.sanitizers,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--out", type=pathlib.Path, default=PAGE)
    parser.add_argument("--kernels", type=pathlib.Path, help="print the table of this file alone")
    args = parser.parse_args()
    if args.kernels:
        print("\n".join(write.kernels(json.loads(args.kernels.read_text()))))
        return
    args.out.write_text(page(args.results))
    print(f"written to {args.out}")


def page(results: pathlib.Path) -> str:
    """The whole page."""
    kinds = {
        each.name: (each.title, kind) for each in SECTIONS if (kind := SUMMED_UP.get(each.name))
    }
    lines, machines = [HEADER, "## In short", "", *summary(results, kinds), ""], Machines()
    for title, name, command, section in SECTIONS:
        lines += [f"## {title}", ""]
        path = results / name
        if not path.exists():
            lines += [f"Not stored yet: `{command}` makes `{name}`.", ""]
            continue
        stored = json.loads(path.read_text())
        lines += [*machines.provenance(stored), "", *section(stored), ""]
    return "\n".join([*lines, "## Machines", "", *machines.lines()]).rstrip() + "\n"


if __name__ == "__main__":
    main()
