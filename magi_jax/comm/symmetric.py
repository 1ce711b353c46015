"""Symmetric memory: what ranks need to reach each other's rows, set up once and used by every call.

    memory = symmetric_memory(mesh, "cp")
    print(memory.describe())
    with memory:
        out = step(..., transport=memory.transport)
        memory.check()

See docs/collectives.md for the protocol, for what happens when a peer never comes, and for which
layouts of processes are served.
"""

import contextlib
from types import TracebackType

import jax
from jax.sharding import Mesh

from magi_jax.comm.exchange import meet
from magi_jax.comm.native import NativeCalls
from magi_jax.comm.nvshmem import Heap
from magi_jax.comm.pools import open_heap, open_pool, seats_of
from magi_jax.comm.portable import PORTABLE
from magi_jax.comm.transport import Transport
from magi_jax.ops import ffi

PLACEMENTS = ("direct", "staged", "nvshmem")

# One SM each; reads over NVLink by 8 of them reach nearly the rate of more, see docs/collectives.md.
_NUM_BLOCKS = 8


class SymmetricMemory:
    """Memory that the ranks of a mesh axis share; made by `symmetric_memory`.

    Attributes:
        transport: what `group_cast`, `group_reduce` and `DistOptions` take.
        num_bytes: device memory that each rank holds.
    """

    def __init__(
        self,
        pools: tuple[int, ...],
        transport: Transport,
        num_bytes: int,
        text: str,
        heap: Heap | None = None,
    ):
        self.transport = transport
        self.num_bytes = num_bytes
        self._pools = pools
        self._text = text
        self._heap = heap

    def describe(self) -> str:
        """Which transport serves, how operands are reached, and what it holds."""
        return self._text

    def failure(self) -> str | None:
        """What went wrong in a call of this process, naming rank and call; None if nothing did.

        It does not wait for the device: what was enqueued and has not run cannot have failed yet.
        """
        failures = (ffi.load().pool_failure(pool) for pool in self._pools)
        return next(filter(None, failures), None)

    def check(self) -> None:
        """Raises what `failure` tells.

        Raises:
            RuntimeError: a call failed; its results and those of all later calls are NaN.
        """
        failure = self.failure()
        if failure:
            raise RuntimeError(failure)

    def close(self) -> None:
        """Frees the memory. Programs that were compiled with its transport cannot run any more."""
        if not self._pools:
            return
        is_whole = self.failure() is None
        # From the last to the first, whatever raises: the barrier does, if another program has failed.
        with contextlib.ExitStack() as steps:
            steps.callback(self._free, is_whole)
            if is_whole:
                steps.callback(meet, f"magi_jax/symmetric_memory/{self._pools}/close", 60.0)
                steps.callback(jax.effects_barrier)

    def _free(self, is_whole: bool) -> None:
        for pool in self._pools:
            ffi.load().remove_pool(pool)
        self._pools = ()
        # A heap is closed together; one whose peers may be gone is left to the end of the process.
        if self._heap is not None and is_whole:
            self._heap.close()

    def __enter__(self) -> "SymmetricMemory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def symmetric_memory(
    mesh: Mesh,
    axis_name: str,
    *,
    placement: str | None = None,
    staging_bytes: int | None = None,
    timeout_s: float = 120.0,
    num_blocks: int = _NUM_BLOCKS,
    allow_portable: bool = False,
) -> SymmetricMemory:
    """Sets up native group collectives over a mesh axis; every process of the mesh calls it.

    Args:
        mesh: the mesh of the calls; devices that differ only along ``axis_name`` exchange rows.
        axis_name: the context-parallel axis.
        placement: "direct": peers read operands in XLA's buffers, for ranks of one process.
            "staged": operands are copied into this memory first, which other processes of the host
            can open too. "nvshmem": the same, but NVSHMEM allocates and maps it; for one process per
            GPU. None takes "direct" where it serves, else "staged".
        staging_bytes: room for the operands of a call; needed when they are staged, see
            `magi_jax.comm.attention_staging_bytes`.
        timeout_s: how long a rank waits for another before it gives up. Compilation counts, where
            ranks are processes: they do not compile in step.
        num_blocks: thread blocks, and so SMs, of a kernel that moves rows; one of a cast and one of
            a reduce may run at a time.
        allow_portable: where nothing native is possible, return a memory whose transport is the
            portable one and whose `describe` says why, instead of raising.

    Raises:
        ValueError: arguments that do not fit the mesh or each other.
        NotImplementedError: nothing native is possible here; the reason is named.
        RuntimeError: a device, or another process, refused.
    """
    if axis_name not in mesh.axis_names:
        raise ValueError(f"axis_name={axis_name!r} is no axis of the mesh {dict(mesh.shape)}")
    if placement not in (None, *PLACEMENTS):
        raise ValueError(f"placement must be one of {PLACEMENTS} or None, got {placement!r}")
    if not 1 <= num_blocks <= 128 or timeout_s <= 0:
        raise ValueError(f"got num_blocks={num_blocks} (1 to 128), timeout_s={timeout_s} (above 0)")
    reason = _refusal(mesh)
    if reason is not None:
        if not allow_portable:
            raise NotImplementedError(f"no native group collectives: {reason}")
        return SymmetricMemory((), PORTABLE, 0, f"portable (padded all_to_all), since {reason}")
    seats = seats_of(mesh, axis_name)
    spread = any(d.process_index != jax.process_index() for s in seats for d in s.group)
    placement = placement or ("staged" if spread else "direct")
    _check_placement(placement, spread, staging_bytes)
    staged = 0 if placement == "direct" else staging_bytes
    settings = (len(seats[0].group), staged or 0, float(timeout_s), num_blocks)
    heap = open_heap(mesh, seats, timeout_s) if placement == "nvshmem" else None
    # Casts and reduces run beside each other: a memory of its own for each.
    cast_pool, reduce_pool = (open_pool(mesh, seats, settings, spread, heap) for _ in range(2))
    pools = cast_pool, reduce_pool
    num_bytes = sum(ffi.load().allocated_bytes(pool, seats[0].ordinal) for pool in pools)
    calls = NativeCalls(cast_pool, reduce_pool, axis_name, mesh.shape[axis_name])
    how = "read in place (peer access)" if placement == "direct" else f"staged in {staged} bytes"
    how += " of NVSHMEM" if placement == "nvshmem" else ""
    where = "several processes of one host" if spread else "one process"
    text = (
        f"native: symmetric memory {pools} over axis {axis_name!r} of {calls.cp_size} ranks in"
        f" {where}, operands {how}, {num_bytes} bytes per device, {num_blocks} blocks"
        f" each for casts and for reduces, time limit {timeout_s} s"
    )
    return SymmetricMemory(pools, calls.transport(), num_bytes, text, heap)


def _refusal(mesh: Mesh) -> str | None:
    platforms = {device.platform for device in mesh.devices.flat}
    if platforms != {"gpu"}:
        return f"they need NVIDIA GPUs, the mesh has devices of {sorted(platforms)}"
    if not ffi.build_info()["cuda"]:
        return ffi.NO_CUDA
    return None


def _check_placement(placement: str, spread: bool, staging_bytes: int | None) -> None:
    if placement == "direct" and spread:
        raise ValueError(
            'placement="direct" needs all ranks of the axis in one process; between processes'
            ' operands are staged: placement="staged"'
        )
    if placement == "nvshmem" and not spread:
        raise ValueError(
            'placement="nvshmem" is for ranks in several processes; those of one process need no'
            ' library: placement="direct"'
        )
    if placement != "direct" and not staging_bytes:
        raise ValueError(
            "staged operands need room: pass staging_bytes, such as"
            " attention_staging_bytes(plan.spec, ...)"
        )
    if placement == "direct" and staging_bytes:
        raise ValueError(
            f"staging_bytes={staging_bytes} serves nothing here, operands are read in place; pass"
            ' placement="staged" to stage them'
        )
