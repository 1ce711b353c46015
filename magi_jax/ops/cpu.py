"""Attention on the CPU: custom calls to the C++ kernels of ``xla_ffi/kernels/cpu``."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from magi_jax.ops import base, ffa_calls
from magi_jax.plan import SliceTable

_KERNEL = ffa_calls.Kernel()


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
        with_row_max: bool = False,
    ) -> tuple[jax.Array, ...]:
        """See `Implementation.forward`."""
        options = {"scale": scale, "logits_soft_cap": logits_soft_cap}
        dtype = base.check_forward(q, k, v, table, options, accumulate, out_dtype)
        return ffa_calls.forward(
            _KERNEL, (q, k, v), table, dtype, accumulate, with_row_max, **options
        )

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
        dq_dtype: Any = jnp.float32,
        accumulate: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Implementation.backward`."""
        base.check_operands(q, k, v, table)
        base.check_options(scale, logits_soft_cap)
        dq_dtype = base.check_dq(dq_dtype, accumulate, q)
        options = {"scale": scale, "logits_soft_cap": logits_soft_cap}
        dtypes = (dq_dtype, base.result_dtype(dkv_dtype, k, "dkv_dtype"))
        tensors = (dout, q, k, v, lse, delta)
        return ffa_calls.backward(_KERNEL, tensors, table, dtypes, accumulate, **options)
