"""Group collectives: rows pushed to the ranks that need them, sums of rows pulled back."""

from magi_jax.comm.group_collectives import group_cast, group_reduce
from magi_jax.comm.symmetric import SymmetricMemory, staging_bytes, symmetric_memory
from magi_jax.comm.transport import Transport

__all__ = [
    "SymmetricMemory",
    "Transport",
    "group_cast",
    "group_reduce",
    "staging_bytes",
    "symmetric_memory",
]
