"""Attention on one device."""

from magi_jax.ops.api import CONTEXT_NAME, flex_flash_attention
from magi_jax.ops.base import BackwardOperands, Implementation
from magi_jax.ops.block_sparse import block_sparse_table
from magi_jax.ops.dot_product import dot_product_attention
from magi_jax.ops.ffi import build_info
from magi_jax.ops.implementations import get_implementation, implementations
from magi_jax.ops.lse import add_sinks, merge, sinks_gradient

__all__ = [
    "CONTEXT_NAME",
    "BackwardOperands",
    "Implementation",
    "add_sinks",
    "block_sparse_table",
    "build_info",
    "dot_product_attention",
    "flex_flash_attention",
    "get_implementation",
    "implementations",
    "merge",
    "sinks_gradient",
]
