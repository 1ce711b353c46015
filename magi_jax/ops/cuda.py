"""Attention on NVIDIA GPUs: custom calls to the CUDA kernels of ``xla_ffi/kernels/sm80`` and ``sm90``.

Path ``sm80`` runs on every GPU from compute capability 8.0 on. Path ``sm90`` is for compute capability 9.0
and takes tables of certain tile sizes; an implementation lists ``sm80`` behind it for the others. The
backward of ``sm90`` adds gradients up in no fixed order; who insists on one gets ``sm90_ordered``, the same
kernel in which thread blocks take turns.
`CudaImplementation.describe` tells which kernels and tiles a call gets.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.ops import base, ffa_calls, ffi
from magi_jax.ops.ffa_calls import Kernel
from magi_jax.plan import SliceTable

_LOWEST_CAPABILITY = (8, 0)
_ONLY_CAPABILITY = {"sm90": (9, 0), "sm90_ordered": (9, 0)}


class BackwardItems(NamedTuple):
    """Into how many items, of each kv head, a Hopper backward dealt its work out, int32 scalars.

    Attributes:
        tiles: tiles of keys, or parts of them by heads; 0 where another kernel took them.
        documents: tiles of short documents, or parts of them by heads.
        segments: tiles whose walk is cut into segments of queries.
        short_runs: tiles that see short runs of queries, walked in shorter blocks.
    """

    tiles: jax.Array
    documents: jax.Array
    segments: jax.Array
    short_runs: jax.Array


@dataclass(frozen=True)
class CudaImplementation(base.Implementation):
    """bfloat16 and float16 kernels with float32 arithmetic.

    Attributes:
        label: its name.
        forward_paths: suffixes of forward targets, the preferred one first; a call takes the first that
            supports it and is refused with the reasons of all when none does.
        backward_paths: likewise.
    """

    label: str
    forward_paths: tuple[str, ...]
    backward_paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its label."""
        return self.label

    @property
    def is_deterministic(self) -> bool:
        """Whether all sums have a fixed order, as those of all kernels but the backward of ``sm90`` have."""
        return "sm90" not in self.backward_paths

    def _forward(self, operands, table, options, out_dtype, accumulate, with_row_max):
        q, k, v = operands
        case = (q, k, v, table, out_dtype, options["logits_soft_cap"])
        kernel, _ = self._choose("forward", *case, with_row_max)
        return ffa_calls.forward(
            kernel, operands, table, out_dtype, accumulate, with_row_max, **options
        )

    def _backward(self, operands, table, options, dtypes, accumulate):
        _, q, k, v, _, _ = operands
        dq_dtype, dkv_dtype = dtypes
        case = (q, k, v, table, dkv_dtype, options["logits_soft_cap"])
        kernel, _ = self._choose("backward", *case, dq_dtype != jnp.float32)
        return ffa_calls.backward(kernel, operands, table, dtypes, accumulate, **options)

    def backward_items(
        self, *tensors: jax.Array, table: SliceTable, dq_dtype: Any, **options: float
    ) -> BackwardItems:
        """Which kernels of path ``sm90`` a backward call ran, for tests: the device decides by the table.

        Args:
            tensors: ``dout, q, k, v, lse, delta`` of `backward`, whose dk and dv have the dtype of k.
            table: the mask.
            dq_dtype: of `backward`.
            options: ``scale`` and ``logits_soft_cap``.

        Raises:
            NotImplementedError: another path serves the call.
        """
        _, q, k, v, _, _ = tensors
        case = (q, k, v, table, k.dtype, options["logits_soft_cap"])
        kernel, _ = self._choose("backward", *case, dq_dtype != jnp.float32)
        if not kernel.suffix.startswith("_sm90"):
            raise NotImplementedError(f"path {kernel.suffix[1:]} has one kernel for all masks")
        dtypes = (jnp.dtype(dq_dtype), k.dtype)
        *_, scratch = ffa_calls.backward_results(kernel, tensors, table, dtypes, None, **options)
        # Words of `Counter` in backward.h.
        return BackwardItems(scratch[1], scratch[2], scratch[4], scratch[6])

    def describe(
        self, q: Any, k: Any, v: Any, table: SliceTable, logits_soft_cap: float = 0.0
    ) -> str:
        """Kernels and tiles that serve operands like these, a line for each direction.

        Args:
            q: ``[T, N, H]``, an array or its `jax.ShapeDtypeStruct`.
            k: ``[S, K, H]``.
            v: ``[S, K, Hv]``.
            table: the mask.
            logits_soft_cap: 0 for none.

        Raises:
            NotImplementedError: there are none; the reasons are named.
        """
        directions = ("forward", "backward")
        case = (q, k, v, table, q.dtype, logits_soft_cap)
        lines = [self._choose(direction, *case)[1] for direction in directions]
        return "\n".join(lines)

    def _choose(
        self, direction: str, q, k, v, table, result_dtype, logits_soft_cap, further=False
    ) -> tuple[Kernel, str]:
        """The kernel that serves a call, and its description.

        ``further`` asks for maxima of a forward call, for dq in the dtype of q of a backward call.
        """
        module = ffi.load()
        if not module.build_info()["cuda"]:
            raise NotImplementedError(f"{self.name}: {ffi.NO_CUDA}")
        backward = direction == "backward"
        extents = (q.shape[0], k.shape[0], q.shape[1], *k.shape[1:], v.shape[2], table.tile_size)
        dtypes = (jnp.dtype(q.dtype).name, jnp.dtype(result_dtype).name)
        reasons = []
        for path in self.backward_paths if backward else self.forward_paths:
            description, refusal, scratch_bytes = module.choose_cuda_kernel(
                path, backward, *dtypes, extents, logits_soft_cap, further
            )
            refusal = refusal or _device_refusal(path)
            if not refusal:
                scratch = (((scratch_bytes // 4,), np.int32),) if scratch_bytes else ()
                return Kernel(f"_{path}", scratch, path != "sm80"), description
            reasons.append(refusal)
        raise NotImplementedError("; ".join(reasons))


SM80 = CudaImplementation("sm80", ("sm80",), ("sm80",))
SM90 = CudaImplementation("sm90", ("sm90",), ("sm90", "sm80"))
SM90_ORDERED = CudaImplementation("sm90_ordered", ("sm90",), ("sm90_ordered", "sm80"))


def for_capability(capability: tuple[int, int], deterministic: bool = False) -> CudaImplementation:
    """Kernels for a device: on Hopper those of sm90 first, else sm80.

    Args:
        capability: compute capability, such as ``(9, 0)``.
        deterministic: take kernels with a fixed order of sums.

    Raises:
        NotImplementedError: the device is older than any kernel.
    """
    paths = tuple(path for path in ("sm90", "sm80") if refusal(path, capability) is None)
    if not paths:
        raise NotImplementedError(refusal("sm80", capability))
    if not deterministic:
        return CudaImplementation("cuda", paths, paths)
    ordered = tuple("sm90_ordered" if path == "sm90" else path for path in paths)
    return CudaImplementation("cuda", paths, ordered)


def refusal(path: str, capability: tuple[int, int]) -> str | None:
    """Why a device of this compute capability cannot run the kernels of a path; None if it can."""
    only = _ONLY_CAPABILITY.get(path)
    if capability >= _LOWEST_CAPABILITY and only in (None, capability):
        return None
    wanted = _dotted(only) if only else f"{_dotted(_LOWEST_CAPABILITY)} or newer"
    return f"{path} needs compute capability {wanted}, the device has {_dotted(capability)}"


@functools.cache
def device_capability() -> tuple[int, int]:
    """Compute capability of the first GPU, such as ``(9, 0)``."""
    major, _, minor = jax.devices("gpu")[0].compute_capability.partition(".")
    return int(major), int(minor)


def _device_refusal(path: str) -> str | None:
    """Nothing is known of the device where a program is compiled ahead on a machine without one."""
    if jax.default_backend() != "gpu":
        return None
    return refusal(path, device_capability())


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
