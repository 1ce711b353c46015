"""Flax: an ``attention_fn`` for its attention modules, and the layers of a small decoder."""

from magi_jax.flax.attention_fn import attention_fn
from magi_jax.flax.layers import Attention, Decoder, DecoderBlock, DecoderConfig, SwiGLU, rotate

__all__ = [
    "Attention",
    "Decoder",
    "DecoderBlock",
    "DecoderConfig",
    "SwiGLU",
    "attention_fn",
    "rotate",
]
