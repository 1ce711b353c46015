"""Kernel tables of pieces, padded so that few programs serve many of them."""

import jax
import numpy as np

from magi_jax.plan.slice_table import build_table
from magi_jax.plan.spec import TableSpec, bucket
from magi_jax.plan.tables import SliceTable
from scaling.work import Piece


def device_table(piece: Piece) -> SliceTable:
    """The kernel table of a piece, padded so that few shapes occur."""
    q_len = piece.q_len if piece.q_len % 8192 == 0 else bucket(piece.q_len, 128)
    k_len = bucket(piece.k_len, 128)
    slices = piece.slices.astype(np.int64)
    sizes = slices, np.zeros(len(slices), np.int64), 1, q_len, k_len, 128, "compiled"
    need = build_table(*sizes).spec
    capacities = need.slices, need.query_runs, need.query_ids, need.key_runs, need.key_ids
    made = build_table(*sizes, TableSpec(q_len, k_len, 128, *map(_roomy, capacities)))
    return jax.tree.map(lambda leaf: leaf[0], made)


def _roomy(size: int) -> int:
    """The next power of eight from 4096 on."""
    power = 4096
    while power < size:
        power *= 8
    return power
