"""Pools: the parts of a symmetric memory, one on each device, allocated, exchanged and connected."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
from jax.sharding import Mesh

from magi_jax.comm.exchange import exchange
from magi_jax.comm.nvshmem import Heap, find_library
from magi_jax.ops import ffi

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Seat:
    """One device of this process and the ranks that it exchanges rows with."""

    device: jax.Device
    rank: int
    group: tuple[jax.Device, ...]

    @property
    def ordinal(self) -> int:
        """Number of the device in the CUDA runtime of this process."""
        return self.device.local_hardware_id


def seats_of(mesh: Mesh, axis_name: str) -> list[Seat]:
    """The devices of this process, of all groups along an axis."""
    axis = mesh.axis_names.index(axis_name)
    groups = np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[axis_name])
    return [
        Seat(device, rank, tuple(group))
        for group in groups
        for rank, device in enumerate(group)
        if device.process_index == jax.process_index()
    ]


def _processes(mesh: Mesh) -> list[int]:
    return sorted({device.process_index for device in mesh.devices.flat})


def open_heap(mesh: Mesh, seats: list[Seat], timeout_s: float) -> Heap:
    """Starts NVSHMEM in all processes of the mesh, each of which has one device.

    Raises:
        NotImplementedError: its wheel is not installed, or a process has several devices.
    """
    path = find_library()
    if path is None:
        raise NotImplementedError(
            'placement="nvshmem" needs the wheel nvidia-nvshmem-cu13 (or -cu12), which is not'
            " installed"
        )
    processes = _processes(mesh)
    if len(processes) != mesh.devices.size:
        raise NotImplementedError(
            f'placement="nvshmem" needs one process per GPU; {mesh.devices.size} devices are in'
            f" {len(processes)} processes"
        )
    heap = Heap(path, seats[0].ordinal)
    rank = processes.index(jax.process_index())
    key = f"magi_jax/nvshmem/{ffi.load().next_pool()}"
    drawn = exchange(key, heap.draw_id() if rank == 0 else b"-", processes, timeout_s)[0]
    heap.open(drawn, rank, len(processes))
    return heap


def open_pool(
    mesh: Mesh, seats: list[Seat], settings: tuple, spread: bool, heap: Heap | None = None
) -> int:
    """Allocates, exchanges and connects the parts of this process.

    Args:
        mesh: the mesh.
        seats: as `seats_of` gives them.
        settings: ranks, bytes of staging, seconds of the time limit, blocks.
        spread: whether ranks of a group are in several processes.
        heap: what allocates the parts; None for the parts themselves.

    Returns:
        The number of the pool.
    """
    module = ffi.load()
    pool = module.next_pool()
    cp_size, staged, timeout_s, num_blocks = settings
    address = 0 if heap is None else heap.allocate(module.member_bytes(cp_size, staged))
    given = () if heap is None else (address,)
    try:
        for seat in seats:
            sizes = cp_size, staged, timeout_s, num_blocks
            module.add_member(pool, seat.ordinal, seat.rank, *sizes, *given)
        exported = {}
        if spread:
            exported = _exchange_parts(module, mesh, pool, seats, settings, heap is None)
        for seat in seats:
            if heap is None:
                _connect(module, pool, seat, exported)
            else:
                _connect_heap(module, pool, seat, _processes(mesh), heap, address)
    except BaseException:
        module.remove_pool(pool)
        raise
    return pool


def _exchange_parts(
    module: ModuleType,
    mesh: Mesh,
    pool: int,
    seats: list[Seat],
    settings: tuple,
    exports: bool,
) -> dict[int, bytes]:
    """What the parts of all processes are opened with, by global number of the device, if they are.

    All parts are there once it returns.
    """
    host = _BOOT_ID.read_text().strip()
    parts = {}
    if exports:
        parts = {seat.device.id: module.export_member(pool, seat.ordinal).hex() for seat in seats}
    own = {"host": host, "settings": list(settings), "parts": parts}
    processes = _processes(mesh)
    key = f"magi_jax/symmetric_memory/{pool}"
    payloads = exchange(key, json.dumps(own).encode(), processes, settings[2])
    exported: dict[int, bytes] = {}
    for process, payload in zip(processes, payloads, strict=True):
        other = json.loads(payload)
        if other["host"] != host:
            raise NotImplementedError(
                f"process {process} runs on another host; native group collectives reach the GPUs"
                " of one host"
            )
        if other["settings"] != list(settings):
            raise ValueError(
                "processes gave different (ranks, staging bytes, timeout, blocks):"
                f" {other['settings']} in process {process}, {list(settings)} here"
            )
        exported |= {int(number): bytes.fromhex(part) for number, part in other["parts"].items()}
    return exported


def _connect(module: ModuleType, pool: int, seat: Seat, exported: dict[int, bytes]) -> None:
    for rank, peer in enumerate(seat.group):
        if rank == seat.rank:
            continue
        if peer.process_index == jax.process_index():
            module.connect_local(pool, seat.ordinal, rank, peer.local_hardware_id)
        else:
            module.connect_exported(pool, seat.ordinal, rank, exported[peer.id])
    module.finish_connecting(pool, seat.ordinal)


def _connect_heap(
    module: ModuleType, pool: int, seat: Seat, processes: list[int], heap: Heap, address: int
) -> None:
    for rank, peer in enumerate(seat.group):
        if rank != seat.rank:
            (mapped,) = heap.mapped(address, [processes.index(peer.process_index)])
            module.connect_mapped(pool, seat.ordinal, rank, mapped)
    module.finish_connecting(pool, seat.ordinal)
