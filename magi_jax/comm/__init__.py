"""Group collectives: rows pushed to the ranks that need them, sums of rows pulled back."""

from magi_jax.comm.group_collectives import (
    finish,
    group_cast,
    group_reduce,
    start_cast,
    start_reduce,
)
from magi_jax.comm.staging import attention_staging_bytes, staging_bytes
from magi_jax.comm.symmetric import SymmetricMemory, symmetric_memory
from magi_jax.comm.transport import InFlight, Transport
from magi_jax.comm.two_level import (
    TwoLevelComm,
    two_level,
    two_level_cast,
    two_level_reduce,
)

__all__ = [
    "InFlight",
    "SymmetricMemory",
    "Transport",
    "TwoLevelComm",
    "attention_staging_bytes",
    "finish",
    "group_cast",
    "group_reduce",
    "staging_bytes",
    "start_cast",
    "start_reduce",
    "symmetric_memory",
    "two_level",
    "two_level_cast",
    "two_level_reduce",
]
