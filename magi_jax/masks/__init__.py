"""Masks as unions of band slices. Imports NumPy alone."""

from magi_jax.masks.attn_mask import AttnMask, concatenate
from magi_jax.masks.attn_slice import AttnSlice, MaskType
from magi_jax.masks.builders import causal, empty, full, global_columns, global_rows, local
from magi_jax.masks.packed import varlen

__all__ = [
    "AttnMask",
    "AttnSlice",
    "MaskType",
    "causal",
    "concatenate",
    "empty",
    "full",
    "global_columns",
    "global_rows",
    "local",
    "varlen",
]
