"""Attention on the CPU: custom calls to the C++ kernels of ``xla_ffi/kernels/cpu``."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax import mesh
from magi_jax.ops import base, ffi
from magi_jax.plan import SliceTable


@dataclass(frozen=True)
class CpuImplementation(base.Implementation):
    """Blockwise C++ kernels on XLA's own threads; time grows with the area of the mask.

    float32, bfloat16 and float16 operands with float32 arithmetic, any head dims, any number of heads. All
    sums have a fixed order for a given machine.
    """

    @property
    def name(self) -> str:
        """``"cpu"``."""
        return "cpu"

    @property
    def is_deterministic(self) -> bool:
        """True."""
        return True

    def forward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        table: SliceTable,
        *,
        scale: float,
        logits_soft_cap: float,
        accumulate: tuple[jax.Array, jax.Array] | None = None,
        out_dtype: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """See `Implementation.forward`."""
        base.check_operands(q, k, v, table)
        base.check_options(scale, logits_soft_cap)
        walk = (table.slices, *table.by_query)
        if accumulate is None:
            target, aliases = ffi.FORWARD, None
            dtype = base.result_dtype(out_dtype, q, "out_dtype")
            operands = mesh.unify_varying(q, k, v, *walk)
        else:
            base.check_accumulate(accumulate, q, v, out_dtype)
            target, dtype = ffi.FORWARD_ACCUMULATE, jnp.dtype(jnp.float32)
            operands = mesh.unify_varying(q, k, v, *walk, *accumulate)
            aliases = {len(operands) - 2: 0, len(operands) - 1: 1}
        results = (
            mesh.result_type((*q.shape[:2], v.shape[2]), dtype, operands[0]),
            mesh.result_type(q.shape[:2], jnp.float32, operands[0]),
        )
        call = _call(target, results, aliases)
        out, lse = call(*operands, **_attributes(table, scale, logits_soft_cap))
        return out, lse

    def backward(
        self,
        dout: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        lse: jax.Array,
        delta: jax.Array,
        table: SliceTable,
        *,
        scale: float,
        logits_soft_cap: float,
        dkv_dtype: Any = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Implementation.backward`."""
        base.check_operands(q, k, v, table)
        base.check_options(scale, logits_soft_cap)
        operands = mesh.unify_varying(
            dout, q, k, v, lse, delta, table.slices, *table.by_query, *table.by_key
        )
        dkv_dtype = base.result_dtype(dkv_dtype, k, "dkv_dtype")
        results = (
            mesh.result_type(q.shape, jnp.float32, operands[0]),
            mesh.result_type(k.shape, dkv_dtype, operands[0]),
            mesh.result_type(v.shape, dkv_dtype, operands[0]),
        )
        call = _call(ffi.BACKWARD, results)
        dq, dk, dv = call(*operands, **_attributes(table, scale, logits_soft_cap))
        return dq, dk, dv


def _call(target: str, results: tuple, aliases: dict[int, int] | None = None):
    ffi.load()
    # Batches run one after the other: each fills all threads, and nothing has to be copied together.
    return jax.ffi.ffi_call(target, results, vmap_method="sequential", input_output_aliases=aliases)


def _attributes(table: SliceTable, scale: float, logits_soft_cap: float) -> dict[str, np.generic]:
    return {
        "scale": np.float32(scale),
        "logits_soft_cap": np.float32(logits_soft_cap),
        "tile_size": np.int32(table.tile_size),
    }
