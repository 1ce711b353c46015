"""Attention on the CPU: custom calls to the C++ kernels of ``xla_ffi/kernels/cpu``."""

from dataclasses import dataclass

from magi_jax.ops import base, ffa_calls

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

    def _forward(self, operands, table, options, out_dtype, accumulate, with_row_max):
        return ffa_calls.forward(
            _KERNEL, operands, table, out_dtype, accumulate, with_row_max, **options
        )

    def _backward(self, operands, table, options, dtypes, accumulate):
        return ffa_calls.backward(_KERNEL, operands, table, dtypes, accumulate, **options)
