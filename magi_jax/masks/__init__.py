"""Masks as unions of band slices. Imports NumPy alone.

`AttnMask` is the mask and `AttnSlice` one slice of it; every other function here builds a mask, or
converts one to what other libraries take.
"""

from magi_jax.masks.attn_mask import AttnMask, concatenate
from magi_jax.masks.attn_slice import AttnSlice, MaskType
from magi_jax.masks.builders import causal, empty, full, global_columns, global_rows, local
from magi_jax.masks.cu_seqlens import CuSeqlens, from_cu_seqlens, to_cu_seqlens
from magi_jax.masks.dense_rows import from_dense
from magi_jax.masks.packed import (
    block_causal,
    chunked_causal,
    prefix_lm,
    shared_question,
    uniform_block_causal,
    varlen,
)
from magi_jax.masks.segment_ids import SegmentIds, from_segment_ids, to_segment_ids

__all__ = [
    "AttnMask",
    "AttnSlice",
    "CuSeqlens",
    "MaskType",
    "SegmentIds",
    "block_causal",
    "causal",
    "chunked_causal",
    "concatenate",
    "empty",
    "from_cu_seqlens",
    "from_dense",
    "from_segment_ids",
    "full",
    "global_columns",
    "global_rows",
    "local",
    "prefix_lm",
    "shared_question",
    "to_cu_seqlens",
    "to_segment_ids",
    "uniform_block_causal",
    "varlen",
]
