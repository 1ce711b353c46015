"""Flax: an ``attention_fn`` for its attention modules, and the layers of a small decoder."""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ModuleNotFoundError(
        'magi_jax.flax needs Flax, which is not installed: pip install "magi_jax[flax]"',
        name="flax",
    )

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
