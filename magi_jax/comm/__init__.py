"""Group collectives: rows go to the ranks that need them, sums of rows come back."""

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
from magi_jax.comm.two_level import cast_in_steps, reduce_in_steps, two_level

__all__ = [
    "InFlight",
    "SymmetricMemory",
    "Transport",
    "attention_staging_bytes",
    "cast_in_steps",
    "finish",
    "group_cast",
    "group_reduce",
    "reduce_in_steps",
    "staging_bytes",
    "start_cast",
    "start_reduce",
    "symmetric_memory",
    "two_level",
]
