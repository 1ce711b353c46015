"""The native transport: custom calls in which ranks read each other's rows where they lie.

A rank reads the operands of its peers over the link between the GPUs and writes its own results:
no block per peer, no padding on the wire, and no rank writes to another's arrays. Results are those
of the portable transport bit for bit; sums are added in the same order. See docs/collectives.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.comm.transport import Leaves, Transport, sum_dtype
from magi_jax.mesh import result_type, unify_varying
from magi_jax.plan import CommMeta

CAST = "magi_jax_group_cast"
REDUCE_SUM = "magi_jax_group_reduce_sum"
REDUCE_LSE = "magi_jax_group_reduce_lse"

MAX_LEAVES = 8  # of one call; kMaxLeaves in xla_ffi/comm/params.h
_SUMMED = ("float32", "float16", "bfloat16", "int32", "uint32", "bool")
_SEEN_BITS = 32  # peers in a word of a reduce's map


@dataclass(frozen=True)
class NativeCalls:
    """The functions of a `Transport` over one symmetric memory.

    Attributes:
        pool: number of the memory.
        axis_name: mesh axis that it was set up for.
        cp_size: ranks of that axis.
    """

    pool: int
    axis_name: str
    cp_size: int

    def transport(self) -> Transport:
        """The transport that these functions make."""
        return Transport("native", self.cast, self.reduce_sum, self.reduce_lse, is_custom_call=True)

    def cast(self, leaves: Leaves, comm: CommMeta, axis_name: str) -> list[jax.Array]:
        """See `Transport.cast`."""
        results: list[jax.Array] = []
        for some in _in_calls(leaves):
            dtypes = [leaf.dtype for leaf in some]
            results += self._call(CAST, some, dtypes, comm, axis_name)
        return results

    def reduce_sum(
        self, leaves: Leaves, comm: CommMeta, axis_name: str, wire_dtype: Any
    ) -> list[jax.Array]:
        """See `Transport.reduce_sum`. Rows that stay are rounded to ``wire_dtype`` as well."""
        results: list[jax.Array] = []
        for some in _in_calls(leaves):
            wire = [leaf.astype(wire_dtype or leaf.dtype) for leaf in some]
            for leaf in wire:
                _check_summed(leaf.dtype)
            dtypes = [sum_dtype(leaf.dtype) for leaf in some]
            sums = self._call(
                REDUCE_SUM, wire, [sum_dtype(leaf.dtype) for leaf in wire], comm, axis_name
            )
            results += [x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True)]
        return results

    def reduce_lse(
        self, out: jax.Array, lse: jax.Array, comm: CommMeta, axis_name: str, wire_dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """See `Transport.reduce_lse`."""
        wire = out.astype(wire_dtype or out.dtype)
        _check_summed(wire.dtype)
        operands = [wire, lse.astype(jnp.float32)]
        merged = self._call(REDUCE_LSE, operands, [jnp.float32] * 2, comm, axis_name)
        return merged[0].astype(sum_dtype(out.dtype)), merged[1].astype(sum_dtype(out.dtype))

    def _call(self, target, leaves, dtypes, comm, axis_name):
        self._check_place(axis_name)
        spec, is_cast = comm.spec, target == CAST
        rows = spec.dst_rows if is_cast else spec.src_rows
        slots = 2 if is_cast else spec.cp_size + -(-spec.cp_size // _SEEN_BITS)
        rank = jax.lax.axis_index(axis_name)
        operands = unify_varying(comm.send, comm.recv, rank, *leaves)
        shapes = [(slots, rows), *((rows, *leaf.shape[1:]) for leaf in leaves)]
        types = [jnp.int32, *dtypes]
        results = tuple(
            result_type(shape, dtype, operands[0])
            for shape, dtype in zip(shapes, types, strict=True)
        )
        call = jax.ffi.ffi_call(target, results, vmap_method="sequential")
        attributes = {
            "pool": self.pool,
            "cp_size": spec.cp_size,
            "src_rows": spec.src_rows,
            "dst_rows": spec.dst_rows,
        }
        # The first result is the call's own map of rows.
        return call(*operands, **{name: np.int32(value) for name, value in attributes.items()})[1:]

    def _check_place(self, axis_name):
        if axis_name != self.axis_name:
            raise ValueError(
                f"symmetric memory {self.pool} was set up for axis {self.axis_name!r}, the call is"
                f" over {axis_name!r}"
            )
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.shape[axis_name] != self.cp_size:
            raise ValueError(
                f"symmetric memory {self.pool} was set up for {self.cp_size} ranks, axis"
                f" {axis_name!r} has {mesh.shape[axis_name]}"
            )
        others = [name for name in mesh.axis_names if name not in mesh.manual_axes]
        if others:
            raise ValueError(
                f"native group collectives run where every mesh axis is manual, {others} are not:"
                " XLA would gather what is sharded over them; make the shard_map manual over them"
                " too"
            )


def _in_calls(leaves: Leaves) -> Iterator[Leaves]:
    for begin in range(0, len(leaves), MAX_LEAVES):
        yield leaves[begin : begin + MAX_LEAVES]


def _check_summed(dtype: Any) -> None:
    if jnp.dtype(dtype).name not in _SUMMED:
        raise NotImplementedError(
            f"the native group_reduce adds {', '.join(_SUMMED)}; got {jnp.dtype(dtype).name}"
        )
