"""Dispatch strategies by name."""

from types import MappingProxyType

from magi_jax.solver.balanced import balanced
from magi_jax.solver.dispatch import contiguous, lpt, zigzag

STRATEGIES = MappingProxyType(
    {"balanced": balanced, "contiguous": contiguous, "zigzag": zigzag, "lpt": lpt}
)
