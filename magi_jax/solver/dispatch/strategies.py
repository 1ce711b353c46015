"""Dispatch strategies by name."""

from types import MappingProxyType

from magi_jax.solver.dispatch.balanced import balanced
from magi_jax.solver.dispatch.regular import contiguous, lpt, zigzag

STRATEGIES = MappingProxyType(
    {"balanced": balanced, "contiguous": contiguous, "zigzag": zigzag, "lpt": lpt}
)
