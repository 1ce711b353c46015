"""What ran on each GPU and when, read from a trace of the JAX profiler.

    python benchmarks/timeline.py FOLDER [--gpu 0] [--least-us 3]

FOLDER is what `jax.profiler.trace` wrote. Times are milliseconds from the first kernel of all GPUs;
kernels on different streams of a GPU that overlap in time ran side by side.
"""

import argparse
import gzip
import json
import pathlib
import re
from typing import NamedTuple


class Kernel(NamedTuple):
    """One kernel or copy: its GPU and stream, its name, and when it ran, in milliseconds."""

    gpu: str
    stream: str
    name: str
    begin_ms: float
    end_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--least-us", type=float, default=3.0, help="shorter kernels are left out")
    args = parser.parse_args()
    print("| stream | kernel | from | to |\n|---|---|---|---|")
    for kernel in read(args.folder):
        if kernel.gpu == args.gpu and kernel.end_ms - kernel.begin_ms >= args.least_us * 1e-3:
            times = f"{kernel.begin_ms:.3f} | {kernel.end_ms:.3f}"
            print(f"| {kernel.stream} | {kernel.name} | {times} |")


def read(folder: pathlib.Path) -> list[Kernel]:
    """All kernels of the newest trace in a folder, by their beginning.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: the trace has no GPU, as one of a CPU has not.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no *.trace.json.gz in {folder}")
    with gzip.open(files[-1]) as file:
        events = json.load(file)["traceEvents"]
    kernels = find(events)
    if not kernels:
        raise ValueError(f"{files[-1]} has no kernel of a GPU")
    return kernels


def find(events: list[dict]) -> list[Kernel]:
    """The kernels among the events of a trace; names without types and namespaces."""
    gpus, streams = {}, {}
    for event in events:
        if event.get("name") == "process_name":
            found = re.search(r"/device:GPU:(\d+)", event["args"]["name"])
            if found:
                gpus[event["pid"]] = found[1]
        elif event.get("name") == "thread_name":
            streams[event["pid"], event["tid"]] = event["args"]["name"]
    ran = [
        event
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in gpus
        and "Stream" in streams.get((event["pid"], event["tid"]), "")
    ]
    start_us = min((event["ts"] for event in ran), default=0.0)
    kernels = [
        Kernel(
            gpus[event["pid"]],
            re.search(r"#(\d+)", streams[event["pid"], event["tid"]])[1],
            short(event["name"]),
            (event["ts"] - start_us) * 1e-3,
            (event["ts"] + event["dur"] - start_us) * 1e-3,
        )
        for event in ran
    ]
    return sorted(kernels, key=lambda kernel: kernel.begin_ms)


def short(name: str) -> str:
    """``void ns::(anonymous namespace)::Kernel<T>(args)`` as ``Kernel``."""
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    name = re.split(r"[<(]", name.removeprefix("void "))[0]
    return name.rsplit("::", 1)[-1].strip()


if __name__ == "__main__":
    main()
