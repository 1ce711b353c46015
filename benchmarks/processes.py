"""Runs of one process with all GPUs, or of one process per GPU, told apart by the same flags."""

import argparse
import functools
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from provenance import save

from magi_jax.comm.exchange import exchange

MEETING_S = 600.0  # that a process may be behind another, which compiles


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `start` and `save_ranks` read."""
    parser.add_argument("--cp", type=int, help="ranks; all devices by default")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--gpus", type=int, help="that processes share; one each by default")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")


def start(flags: argparse.Namespace) -> Mesh:
    """Meets the other processes, where there are some, and makes the mesh (cp,)."""
    if flags.coordinator:
        device = flags.process % (flags.gpus or flags.processes)
        jax.distributed.initialize(
            flags.coordinator, flags.processes, flags.process, local_device_ids=[device]
        )
    devices = jax.devices()[: flags.cp or jax.device_count()]
    return Mesh(np.array(devices), ("cp",), axis_types=(AxisType.Auto,))


def from_all(value: Any, what: str) -> list:
    """What each process gives, in their order; ``what`` it is has to be said by all alike, or none goes on.

    By the key-value store: XLA's own collectives are refused where processes share a GPU.
    """
    if jax.process_count() == 1:
        return [value]
    key = f"magi_jax/benchmarks/{next(_numbers())}/{what}"
    given = json.dumps(value).encode()
    everyone = exchange(key, given, range(jax.process_count()), MEETING_S)
    return [json.loads(each) for each in everyone]


@functools.cache
def _numbers() -> Iterator[int]:
    return itertools.count()


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays that every process has, each part on its device, without a word between processes."""

    def one(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(one, tree)


def save_ranks(flags: argparse.Namespace, mesh: Mesh, rows: list[dict[str, Any]]) -> None:
    """Writes the figures of all ranks from process 0, where a file is asked for."""
    if flags.json and jax.process_index() == 0:
        layout = "one process per GPU" if flags.coordinator else "one process"
        save(flags.json, flags.commit, {"ranks": mesh.size, "layout": layout, "rows": rows})
