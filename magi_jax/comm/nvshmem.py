"""Symmetric memory of NVSHMEM, from the host library of the ``nvidia-nvshmem`` wheels.

NVSHMEM allocates the same memory in every process and maps that of its peers wherever the device reaches it,
which is inside a host; see docs/collectives.md for what is between hosts. Processes find each other by an id
that the first of them draws, and that travels over the key-value store of `jax.distributed`.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path

_LIBRARY = "libnvshmem_host.so.3"
_RUNTIMES = ("libcudart.so.13", "libcudart.so.12")
_WITH_UNIQUE_ID = 1 << 3
# Versions of structures: a number and their size, as the headers of NVSHMEM 3 give them.
_FIRST = 1 << 16
_ID_BYTES, _ARGS_BYTES, _ATTRIBUTE_BYTES = 128, 128, 144


class _UniqueId(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("internal", ctypes.c_char * 124))


class _IdArguments(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("unique_id", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("ranks", ctypes.c_int),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("of_id", _IdArguments),
        ("rest", ctypes.c_char * 96),
    )


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("mpi_communicator", ctypes.c_void_p),
        ("arguments", _Arguments),
    )


def find_library() -> Path | None:
    """The host library of an installed wheel; None where there is none."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        path = Path(root, "nvshmem", "lib", _LIBRARY)
        if path.exists():
            return path
    return None


class Heap:
    """Memory that the processes of a program allocate together, each for its one device.

    Args:
        path: the host library.
        device: number of the device in the CUDA runtime.
    """

    def __init__(self, path: Path, device: int):
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._device = device
        self._memory: list[int] = []
        self._runtime = _cuda_runtime()
        for name, result, *arguments in (
            ("nvshmem_malloc", ctypes.c_void_p, ctypes.c_size_t),
            ("nvshmem_free", None, ctypes.c_void_p),
            ("nvshmem_ptr", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def draw_id(self) -> bytes:
        """A unique id, for all processes."""
        unique_id = _UniqueId(_FIRST + _ID_BYTES)
        self._check(self._library.nvshmemx_get_uniqueid(ctypes.byref(unique_id)), "draw an id")
        return bytes(unique_id)

    def open(self, unique_id: bytes, rank: int, ranks: int) -> None:
        """Meets the other processes, all of which call it with the same id.

        Raises:
            RuntimeError: NVSHMEM refused.
        """
        self._check(self._runtime.cudaSetDevice(self._device), "choose the device")
        drawn = _UniqueId.from_buffer_copy(unique_id)
        arguments = _Arguments(_FIRST + _ARGS_BYTES, _IdArguments(_FIRST + 24))
        attributes = _Attributes(_FIRST + _ATTRIBUTE_BYTES, None, arguments)
        place = (ctypes.byref(drawn), ctypes.byref(attributes))
        status = self._library.nvshmemx_set_attr_uniqueid_args(rank, ranks, *place)
        self._check(status, "take the id")
        status = self._library.nvshmemx_hostlib_init_attr(_WITH_UNIQUE_ID, place[1])
        self._check(status, f"start as process {rank} of {ranks}")

    def allocate(self, num_bytes: int) -> int:
        """Address of new memory; all processes call it alike.

        Raises:
            RuntimeError: there is not that much.
        """
        address = self._library.nvshmem_malloc(num_bytes)
        if not address:
            raise RuntimeError(
                f"NVSHMEM has no {num_bytes} bytes of symmetric memory; NVSHMEM_SYMMETRIC_SIZE in the"
                " environment sets how much it reserves"
            )
        self._memory.append(address)
        return address

    def mapped(self, address: int, ranks: Sequence[int]) -> list[int]:
        """Where this device reaches what other processes have at ``address``.

        Raises:
            NotImplementedError: it does not reach one of them, which is on another host.
        """
        addresses = [self._library.nvshmem_ptr(address, rank) for rank in ranks]
        for rank, found in zip(ranks, addresses, strict=True):
            if not found:
                raise NotImplementedError(
                    f"the memory of process {rank} is not mapped here: it is on another host, or there is"
                    " no peer access"
                )
        return addresses

    def close(self) -> None:
        """Frees everything; all processes call it."""
        for address in self._memory:
            self._library.nvshmem_free(address)
        self._memory = []
        self._library.nvshmemx_hostlib_finalize()

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"NVSHMEM did not {what}: status {status}")


def _cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that this process has loaded."""
    for name in _RUNTIMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"NVSHMEM needs the CUDA runtime, none of {', '.join(_RUNTIMES)} was found")
