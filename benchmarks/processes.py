"""Runs of one process with all GPUs, or of one process per GPU, told apart by the same flags."""

import argparse
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from provenance import save


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `start` and `save_ranks` read."""
    parser.add_argument("--cp", type=int, help="ranks; all devices by default")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--commit")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")


def start(flags: argparse.Namespace) -> Mesh:
    """Meets the other processes, where there are some, and makes the mesh (cp,)."""
    if flags.coordinator:
        jax.distributed.initialize(
            flags.coordinator, flags.processes, flags.process, local_device_ids=[flags.process]
        )
    devices = jax.devices()[: flags.cp or jax.device_count()]
    return Mesh(np.array(devices), ("cp",), axis_types=(AxisType.Auto,))


def save_ranks(flags: argparse.Namespace, mesh: Mesh, rows: list[dict[str, Any]]) -> None:
    """Writes the figures of all ranks from process 0, where a file is asked for."""
    if flags.json and jax.process_index() == 0:
        layout = "one process per GPU" if flags.coordinator else "one process"
        save(flags.json, flags.commit, {"ranks": mesh.size, "layout": layout, "rows": rows})
