"""Rows that move between ranks, as tables that senders and receivers read."""

from typing import NamedTuple

import numpy as np

from magi_jax.solver import intervals
from magi_jax.solver.dispatch.layout import Layout
from magi_jax.solver.engine import compiled
from magi_jax.solver.work.remote import Remote


class Pieces(NamedTuple):
    """Runs of rows that move together: ``[E]`` each."""

    src: np.ndarray
    dst: np.ndarray
    src_row: np.ndarray
    dst_row: np.ndarray
    n_rows: np.ndarray


class Transfer(NamedTuple):
    """Tables of a transfer without padding; see docs/architecture.md, ``CommMeta``.

    Attributes:
        send: ``[E, 5]`` int64 ``(peer, src_row, dst_row, n_rows, slot)``, sorted by (rank, peer,
            slot).
        send_rank: ``[E]`` rank that sends, rising.
        recv: ``[E, 5]`` the same pieces at the receiver, sorted by (rank, ``dst_row``).
        recv_rank: ``[E]`` rank that receives, rising.
        pair_rows: most rows between two different ranks.
        self_rows: most rows that a rank keeps.
        dst_rows: most rows that a rank receives into its buffer.
    """

    send: np.ndarray
    send_rank: np.ndarray
    recv: np.ndarray
    recv_rank: np.ndarray
    pair_rows: int
    self_rows: int
    dst_rows: int


def stage_pieces(remote: Remote, stage: int) -> Pieces:
    """Pieces of one remote stage."""
    pick = np.flatnonzero(remote.stage == stage)
    return Pieces(
        remote.src[pick],
        remote.dst[pick],
        remote.src_row[pick],
        remote.dst_row[pick],
        (remote.end - remote.begin)[pick],
    )


def dispatch_pieces(layout: Layout) -> Pieces:
    """From the contiguous layout, ``ceil(seq_len / cp)`` rows per rank, to the dispatched one."""
    per_rank = -(-layout.seq_len // layout.cp_size)
    cuts = np.arange(0, layout.seq_len, max(per_rank, 1))
    edges = intervals.distinct(layout.edges, cuts)
    begin, size = edges[:-1], np.diff(edges)
    segment = layout.segment_of(begin)
    src = begin // max(per_rank, 1)
    return Pieces(
        src, layout.owner[segment], begin - src * per_rank, begin + layout.offset[segment], size
    )


def roll_pieces(layout: Layout, shift: int) -> Pieces:
    """Within the dispatched layout: the row at position ``p`` receives the row at ``p - shift``.

    Nothing wraps: positions whose source lies outside ``[0, seq_len)`` receive nothing.
    """
    low, high = max(shift, 0), min(layout.seq_len, layout.seq_len + shift)
    edges = intervals.distinct(layout.edges, layout.edges + shift)
    edges = edges[(edges >= low) & (edges <= high)]
    begin, size = edges[:-1], np.diff(edges)
    to, source = layout.segment_of(begin), layout.segment_of(begin - shift)
    return Pieces(
        layout.owner[source],
        layout.owner[to],
        begin - shift + layout.offset[source],
        begin + layout.offset[to],
        size,
    )


def transfer_tables(pieces: Pieces, cp_size: int, engine: str = "numpy") -> Transfer:
    """Sorts pieces for senders and receivers and gives each a slot in the block of its pair.

    Args:
        pieces: what moves.
        cp_size: number of ranks.
        engine: "numpy" or "compiled"; both find the same.
    """
    if engine == "compiled":
        return Transfer(*compiled().sort_pieces(*pieces, cp_size))
    pair = pieces.src * cp_size + pieces.dst
    order = np.lexsort((pieces.dst_row, pair))
    src, dst, src_row, dst_row, n_rows = (column[order] for column in pieces)
    slot = intervals.offsets(pair[order], n_rows, cp_size * cp_size)
    send = np.stack([dst, src_row, dst_row, n_rows, slot], axis=1)
    recv = np.stack([src, src_row, dst_row, n_rows, slot], axis=1)
    by_receiver = np.lexsort((dst_row, dst))
    rows = np.bincount(pair, weights=pieces.n_rows, minlength=cp_size * cp_size)
    rows = rows.reshape(cp_size, cp_size).astype(np.int64)
    kept = rows.diagonal()
    return Transfer(
        send=send,
        send_rank=src,
        recv=recv[by_receiver],
        recv_rank=dst[by_receiver],
        pair_rows=int((rows - np.diag(kept)).max()),
        self_rows=int(kept.max()),
        dst_rows=int((dst_row + n_rows).max(initial=0)),
    )
