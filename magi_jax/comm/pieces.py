"""Expands the pieces of a `CommMeta` into row indices, on the device.

A plan holds pieces (runs of consecutive rows), not an index per row: its size does not grow with
the number of tokens. The indices live only inside the compiled program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from magi_jax.plan import CommMeta, CommSpec
from magi_jax.plan.tables import DST_ROW, N_ROWS, PEER, SLOT, SRC_ROW

MOST_COMPARED = 64  # keys; on a CPU, searching 16,384 rows among more is faster


class SlotRows(NamedTuple):
    """Rows at slots of the blocks that a rank exchanges with its peers; all ``[peers, slots]``.

    Attributes:
        src_row: row in the sender's local input.
        dst_row: row in the receiver's buffer.
        valid: whether anything lies there; rows are undefined elsewhere.
    """

    src_row: jax.Array
    dst_row: jax.Array
    valid: jax.Array


def pair_slots(pieces: jax.Array, spec: CommSpec, rank: jax.Array) -> SlotRows:
    """Rows at each slot of the block shared with each rank of the group, ``[peers, pair_rows]``.

    Args:
        pieces: ``[L, 5]`` sorted by (peer, slot); either side of the transfer.
        spec: sizes of the transfer.
        rank: the calling rank; its own block is never valid, since rows that stay are copied
            locally.
    """
    first = rank - block_of(rank, spec) * spec.stride
    peers = first + spec.stride * jnp.arange(spec.num_peers, dtype=jnp.int32)[:, None]
    rows = _slot_rows(pieces, spec, peers, spec.pair_rows)
    return rows._replace(valid=rows.valid & (peers != rank)) if spec.self_rows else rows


def block_of(rank: jax.Array, spec: CommSpec) -> jax.Array:
    """Which block of its group belongs to a rank."""
    return rank // spec.stride % spec.num_peers


def groups(spec: CommSpec) -> list[list[int]] | None:
    """Ranks of each group, in the order of their blocks; None where all ranks are one."""
    if spec.num_peers == spec.cp_size:
        return None
    size = spec.num_peers * spec.stride
    firsts = [base + i for base in range(0, spec.cp_size, size) for i in range(spec.stride)]
    return [list(range(first, first + size, spec.stride)) for first in firsts]


def self_slots(pieces: jax.Array, spec: CommSpec, rank: jax.Array) -> SlotRows:
    """Rows that the rank keeps, ``[1, self_rows]``."""
    return _slot_rows(pieces, spec, jnp.reshape(rank, (1, 1)), spec.self_rows)


def by_slot(pieces: jax.Array, spec: CommSpec) -> jax.Array:
    """Sorts pieces ``[L, 5]`` of the receiving side by (peer, slot)."""
    return pieces[jnp.argsort(_slot_keys(pieces, spec))]


def _slot_stride(spec: CommSpec) -> int:
    return max(spec.pair_rows, spec.self_rows)


def _slot_keys(pieces, spec):
    return pieces[:, PEER] * _slot_stride(spec) + pieces[:, SLOT]


def _slot_rows(pieces, spec, peers, num_slots):
    slots = jnp.arange(num_slots, dtype=jnp.int32)[None, :]
    found = _last_at_or_before(_slot_keys(pieces, spec), peers * _slot_stride(spec) + slots)
    piece = pieces[jnp.maximum(found, 0)]
    offset = slots - piece[..., SLOT]
    valid = (found >= 0) & (piece[..., PEER] == peers) & (offset < piece[..., N_ROWS])
    return SlotRows(piece[..., SRC_ROW] + offset, piece[..., DST_ROW] + offset, valid)


class Source(NamedTuple):
    """Where each row of the receiver's buffer comes from; all ``[dst_rows]``.

    Attributes:
        peer: rank that holds it.
        slot: its slot in that rank's block.
        src_row: its row in that rank's local input.
        valid: whether any rank sends it; undefined elsewhere.
    """

    peer: jax.Array
    slot: jax.Array
    src_row: jax.Array
    valid: jax.Array


def sources(comm: CommMeta) -> Source:
    """Source of each row of the buffer of one rank; ``comm`` without its ``[cp]`` axis."""
    rows = jnp.arange(comm.dst_rows, dtype=jnp.int32)
    found = _last_at_or_before(comm.recv[:, DST_ROW], rows)
    piece = comm.recv[jnp.maximum(found, 0)]
    offset = rows - piece[:, DST_ROW]
    valid = (found >= 0) & (offset < piece[:, N_ROWS])
    return Source(piece[:, PEER], piece[:, SLOT] + offset, piece[:, SRC_ROW] + offset, valid)


def _last_at_or_before(keys: jax.Array, queries: jax.Array) -> jax.Array:
    """Index of the last of the rising ``keys`` that is not above each query, or -1."""
    # Few keys are compared with all queries: one operation, as fast as a search and compiled in a third of
    # its time. A search is unrolled: a loop would carry indices whose type (varying axes) changes on the way.
    method = "compare_all" if keys.size <= MOST_COMPARED else "scan_unrolled"
    return jnp.searchsorted(keys, queries, side="right", method=method).astype(jnp.int32) - 1
