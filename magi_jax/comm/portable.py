"""The portable transport: rows gathered into one block per peer, `all_to_all`, rows put in place.

It runs on every platform and across processes, and it is the meaning that other transports are
tested against. Blocks have the static size ``pair_rows``, so the wire carries their padding. Ranks
exchange blocks with those of their group alone (`CommSpec.peers`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from magi_jax.comm import pieces
from magi_jax.comm.transport import Leaves, Transport, sum_dtype
from magi_jax.mesh import make_varying, varying_axes
from magi_jax.plan import CommMeta, CommSpec


def _exchange(blocks: jax.Array, axis_name: str, spec: CommSpec) -> jax.Array:
    """Hands block ``p`` of ``[peers, pair_rows, ...]`` to rank ``p`` of the group; the result's is from
    there.
    """
    if blocks.shape[0] == 1:
        return blocks
    groups = pieces.groups(spec)
    return jax.lax.all_to_all(
        blocks, axis_name, split_axis=0, concat_axis=0, axis_index_groups=groups
    )


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of ``x``; any row where the index is out of range: the receiver ignores those."""
    return x.at[rows].get(mode="clip")


def cast(leaves: Leaves, comm: CommMeta, axis_name: str) -> list[jax.Array]:
    """See `Transport.cast`."""
    rank = jax.lax.axis_index(axis_name)
    sent = pieces.pair_slots(comm.send, comm.spec, rank)
    source = pieces.sources(comm)
    remote = source.valid & (source.peer != rank)
    past_end = comm.spec.num_peers * comm.pair_rows
    block = pieces.block_of(source.peer, comm.spec)
    place = jnp.where(remote, block * comm.pair_rows + source.slot, past_end)
    kept = jnp.where(source.valid & ~remote, source.src_row, comm.src_rows)

    def move(x):
        received = _exchange(_take(x, sent.src_row), axis_name, comm.spec)
        received = received.reshape(past_end, *x.shape[1:])
        moved = received.at[place].get(mode="fill", fill_value=0)
        if not comm.self_rows:
            return moved
        stays = jnp.reshape(source.valid & ~remote, (-1,) + (1,) * (x.ndim - 1))
        return jnp.where(stays, _take(x, kept), moved)

    return [move(x) for x in leaves]


class _Returned:
    """The way back of rows: what leaves in each slot, and where what comes back belongs."""

    def __init__(self, comm: CommMeta, axis_name: str):
        rank = jax.lax.axis_index(axis_name)
        spec = comm.spec
        self.axis_name, self.spec = axis_name, spec
        self.leaving = pieces.pair_slots(pieces.by_slot(comm.recv, spec), spec, rank).dst_row
        self.rows = _owner_rows(pieces.pair_slots(comm.send, spec, rank), spec.src_rows)
        kept = pieces.self_slots(comm.send, spec, rank)
        self.keeps_rows = spec.self_rows > 0
        self.kept_rows = _owner_rows(kept, spec.src_rows)[0]
        self.kept_from = kept.dst_row[0]

    def fold(self, step: Callable, state, *leaves: jax.Array, wire_dtypes: tuple):
        """Folds ``state = step(state, rows, *values)`` over the peers in order, itself last.

        Rows of one step are distinct (those out of range are dropped), so no step needs atomics and
        the result does not depend on timing.
        """
        wire = [y.astype(dtype) for y, dtype in zip(leaves, wire_dtypes, strict=True)]
        blocks = [_exchange(_take(y, self.leaving), self.axis_name, self.spec) for y in wire]
        state = make_varying(state, varying_axes((blocks, self.rows)))
        state, _ = jax.lax.scan(lambda s, xs: (step(s, *xs), None), state, (self.rows, *blocks))
        if self.keeps_rows:
            state = step(state, self.kept_rows, *(_take(y, self.kept_from) for y in leaves))
        return state


def _owner_rows(slots: pieces.SlotRows, src_rows: int) -> jax.Array:
    """Rows of the owner ``[peers, slots]``; distinct rows past the end where nothing lies."""
    past_end = src_rows + jnp.arange(slots.valid.shape[1], dtype=jnp.int32)
    return jnp.where(slots.valid, slots.src_row, past_end)


def reduce_sum(leaves: Leaves, comm: CommMeta, axis_name: str, wire_dtype) -> list[jax.Array]:
    """See `Transport.reduce_sum`."""
    returned = _Returned(comm, axis_name)

    def add(total, rows, values):
        values = values.astype(total.dtype)
        put = {"mode": "drop", "unique_indices": True}
        if total.dtype == bool:
            return total.at[rows].max(values, **put)
        return total.at[rows].add(values, **put)

    def reduce(y):
        total = jnp.zeros((comm.src_rows, *y.shape[1:]), sum_dtype(y.dtype))
        return returned.fold(add, total, y, wire_dtypes=(wire_dtype or y.dtype,))

    return [reduce(y) for y in leaves]


def reduce_lse(
    out: jax.Array, lse: jax.Array, comm: CommMeta, axis_name: str, wire_dtype
) -> tuple[jax.Array, jax.Array]:
    """See `Transport.reduce_lse`."""
    returned = _Returned(comm, axis_name)
    dtype = sum_dtype(out.dtype)

    def merge(state, rows, part_out, part_lse):
        total_out, total_lse = state
        old_out, old_lse = _take(total_out, rows), _take(total_lse, rows)
        new_lse = jnp.logaddexp(old_lse, part_lse.astype(dtype))
        new_out = old_out * _weight(old_lse, new_lse)
        new_out += part_out.astype(dtype) * _weight(part_lse, new_lse)
        put = {"mode": "drop", "unique_indices": True}
        return total_out.at[rows].set(new_out, **put), total_lse.at[rows].set(new_lse, **put)

    empty = (
        jnp.zeros((comm.src_rows, *out.shape[1:]), dtype),
        jnp.full((comm.src_rows, *lse.shape[1:]), -jnp.inf, dtype),
    )
    return returned.fold(merge, empty, out, lse, wire_dtypes=(wire_dtype or out.dtype, lse.dtype))


def _weight(part_lse: jax.Array, lse: jax.Array) -> jax.Array:
    """``exp(part_lse - lse)`` with a trailing axis; 0 where the part has seen nothing."""
    seen = part_lse > -jnp.inf
    return jnp.where(seen, jnp.exp(jnp.where(seen, part_lse - lse, 0.0)), 0.0)[..., None]


PORTABLE = Transport("portable", cast, reduce_sum, reduce_lse)
