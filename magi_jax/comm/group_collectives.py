"""`group_cast` pushes rows to exactly the ranks that need them, `group_reduce` pulls sums back.

They are each other's transpose, and each is the other's derivative. See docs/architecture.md,
"Plan", for the tables of a `CommMeta`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from magi_jax.comm.cotangents import floating_cotangents
from magi_jax.comm.portable import PORTABLE
from magi_jax.comm.transport import InFlight, Leaves, Transport, sum_dtype
from magi_jax.mesh import make_varying, manual_axis_size, varying_axes
from magi_jax.plan import CommMeta

TRANSPORTS = {PORTABLE.name: PORTABLE}
OPS = ("sum", "lse")


def get_transport(name: str | Transport | None) -> Transport:
    """Looks a transport up by name; None is the portable one, a transport is itself.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(name, Transport):
        return name
    name = PORTABLE.name if name is None else name
    if name not in TRANSPORTS:
        raise ValueError(
            f"unknown transport {name!r}; there are {sorted(TRANSPORTS)}, and those that"
            " symmetric_memory(...) sets up"
        )
    return TRANSPORTS[name]


def group_cast(
    x: Any, comm: CommMeta, axis_name: str, *, transport: str | Transport | None = None
) -> Any:
    """Sends rows of ``x`` to the ranks that need them and puts each where ``comm`` says.

    Call it inside a `shard_map` that is manual over ``axis_name``. Its derivative is
    `group_reduce`, with sums in float32.

    Args:
        x: pytree of arrays ``[src_rows, ...]`` of any dtype.
        comm: the transfer, with its ``[cp]`` axis sharded, whole or already stripped.
        axis_name: mesh axis whose ranks exchange rows.
        transport: None or "portable": padded `all_to_all`; or the transport of a
            `symmetric_memory`.

    Returns:
        The pytree with leaves ``[dst_rows, ...]``; rows that nobody sends are zero.

    Raises:
        ValueError: wrong number of rows, ``comm`` for another number of ranks, or an axis that is
            not manual.
    """
    backend = get_transport(transport)
    local = _local_comm(comm, axis_name, "group_cast")
    leaves, treedef = jax.tree.flatten(x)
    leaves = _prepare(leaves, local, axis_name, local.src_rows, "group_cast", "src_rows")
    moved = _cast(backend, axis_name, leaves, local)
    return jax.tree.unflatten(treedef, moved)


def group_reduce(
    y: Any,
    comm: CommMeta,
    axis_name: str,
    *,
    op: str = "sum",
    wire_dtype: Any = None,
    out_dtype: Any = None,
    transport: str | Transport | None = None,
) -> Any:
    """Returns rows to their owners and combines them there: the transpose of `group_cast`.

    Call it inside a `shard_map` that is manual over ``axis_name``. The order of the additions is
    fixed.

    Args:
        y: for "sum" a pytree of arrays ``[dst_rows, ...]`` (booleans are or'ed); for "lse" a pair
            ``(out, lse)`` of partial results ``[dst_rows, N, Hv]`` and ``[dst_rows, N]``.
        comm: the transfer, with its ``[cp]`` axis sharded, whole or already stripped.
        axis_name: mesh axis whose ranks exchange rows.
        op: "sum", or "lse": ``out`` averaged with the weights ``exp(lse)``, ``lse`` log-sum-exp'ed.
        wire_dtype: dtype in which values travel (``out`` for "lse"); None keeps the dtype of each
            leaf.
        out_dtype: dtype of the result; None keeps the dtype of each leaf. Sums are made in float32
            in any case.
        transport: None or "portable": padded `all_to_all`; or the transport of a
            `symmetric_memory`.

    Returns:
        The same structure with leaves ``[src_rows, ...]``. Rows that nobody returns are zero (lse
        -inf).

    Raises:
        ValueError: wrong number of rows or shapes, an unknown ``op``, ``comm`` for another number
            of ranks, or an axis that is not manual.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {OPS}, got {op!r}")
    backend = get_transport(transport)
    local = _local_comm(comm, axis_name, "group_reduce")
    leaves, treedef = jax.tree.flatten(y)
    leaves = _prepare(leaves, local, axis_name, local.dst_rows, "group_reduce", "dst_rows")
    wire = None if wire_dtype is None else jnp.dtype(wire_dtype)
    if op == "lse":
        _check_partials(leaves)
        reduced = _reduce_lse(backend, axis_name, wire, *leaves, local)
        reduced = [x.astype(out_dtype or y.dtype) for x, y in zip(reduced, leaves, strict=True)]
    else:
        dtypes = tuple(jnp.dtype(out_dtype or leaf.dtype) for leaf in leaves)
        reduced = _reduce(backend, axis_name, wire, dtypes, leaves, local)
    return jax.tree.unflatten(treedef, reduced)


def start_cast(
    x: Any, comm: CommMeta, axis_name: str, *, transport: Transport, exposed: bool = False
) -> InFlight:
    """Begins a `group_cast` that runs beside what is computed until `finish`; no derivative.

    What is returned is for `finish` alone, once. Arguments are those of `group_cast`, and ``exposed`` that of
    `Transport.start_cast`.
    """
    local = _local_comm(comm, axis_name, "start_cast")
    leaves = _prepare(
        jax.tree.leaves(x), local, axis_name, local.src_rows, "start_cast", "src_rows"
    )
    if transport.start_cast is None:
        return InFlight(tuple(transport.cast(leaves, local, axis_name)))
    return transport.start_cast(leaves, local, axis_name, exposed)


def start_reduce(
    y: Any,
    comm: CommMeta,
    axis_name: str,
    *,
    wire_dtype: Any,
    transport: Transport,
    onto: Leaves | None = None,
) -> InFlight:
    """Begins a `group_reduce` of sums in float32, as `start_cast` does; arguments are theirs.

    ``onto`` are leaves like the results, to which the sums are added.
    """
    local = _local_comm(comm, axis_name, "start_reduce")
    leaves = jax.tree.leaves(y)
    leaves = _prepare(leaves, local, axis_name, local.dst_rows, "start_reduce", "dst_rows")
    if transport.start_reduce_sum is None:
        sums = transport.reduce_sum(leaves, local, axis_name, wire_dtype)
        return InFlight(tuple(sums if onto is None else map(jnp.add, onto, sums)))
    return transport.start_reduce_sum(leaves, local, axis_name, wire_dtype, onto)


def finish(in_flight: InFlight, transport: Transport) -> list[jax.Array]:
    """The leaves of a call that was started: what follows waits for it."""
    if transport.finish_call is None:
        return list(in_flight.leaves)
    return transport.finish_call(in_flight)


def _local_comm(comm: CommMeta, axis_name: str, function: str) -> CommMeta:
    size = manual_axis_size(axis_name, function)
    if size != comm.spec.cp_size:
        raise ValueError(
            f"{function}: the transfer was planned for {comm.spec.cp_size} ranks, but axis"
            f" {axis_name!r} has {size}"
        )
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit:
        raise ValueError(
            f"{function} moves rows where the other mesh axes are manual or automatic; {explicit}"
            " are explicit"
            " here: make the surrounding shard_map manual over them too"
        )
    return comm.local(jax.lax.axis_index(axis_name))


def _prepare(leaves, comm, axis_name, num_rows, function, rows_name):
    for leaf in leaves:
        if not jnp.ndim(leaf) or leaf.shape[0] != num_rows:
            raise ValueError(
                f"{function} needs leaves of {num_rows} rows ({rows_name} of the transfer) on their"
                " leading axis,"
                f" got shape {jnp.shape(leaf)}"
            )
    axes = varying_axes((leaves, comm)) | {axis_name}
    return make_varying([jnp.asarray(leaf) for leaf in leaves], axes)


def _check_partials(leaves):
    if len(leaves) != 2 or leaves[0].shape[:-1] != leaves[1].shape:
        raise ValueError(
            'op="lse" takes a pair (out [dst_rows, N, Hv], lse [dst_rows, N]), got shapes'
            f" {[leaf.shape for leaf in leaves]}"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cast(backend, axis_name, leaves, comm):
    return backend.cast(leaves, comm, axis_name)


def _cast_forward(backend, axis_name, leaves, comm):
    return _cast(backend, axis_name, leaves, comm), comm


def _cast_backward(backend, axis_name, comm, cotangents):
    def transpose(floating):
        dtypes = tuple(g.dtype for g in floating)
        return _reduce(backend, axis_name, None, dtypes, floating, comm)

    return floating_cotangents(transpose, cotangents), None


_cast.defvjp(_cast_forward, _cast_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _reduce(backend, axis_name, wire_dtype, out_dtypes, leaves, comm):
    sums = backend.reduce_sum(leaves, comm, axis_name, wire_dtype)
    return [total.astype(dtype) for total, dtype in zip(sums, out_dtypes, strict=True)]


def _reduce_forward(backend, axis_name, wire_dtype, out_dtypes, leaves, comm):
    like = [jnp.zeros((), leaf.dtype) for leaf in leaves]
    return _reduce(backend, axis_name, wire_dtype, out_dtypes, leaves, comm), (like, comm)


def _reduce_backward(backend, axis_name, wire_dtype, out_dtypes, residuals, cotangents):
    like, comm = residuals
    like = [y for y in like if jnp.issubdtype(y.dtype, jnp.inexact)]

    def transpose(floating):
        wire = [g.astype(wire_dtype or y.dtype) for g, y in zip(floating, like, strict=True)]
        cast = _cast(backend, axis_name, wire, comm)
        return [g.astype(y.dtype) for g, y in zip(cast, like, strict=True)]

    return floating_cotangents(transpose, cotangents), None


_reduce.defvjp(_reduce_forward, _reduce_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reduce_lse(backend, axis_name, wire_dtype, out, lse, comm):
    return backend.reduce_lse(out, lse, comm, axis_name, wire_dtype)


def _reduce_lse_forward(backend, axis_name, wire_dtype, out, lse, comm):
    merged = _reduce_lse(backend, axis_name, wire_dtype, out, lse, comm)
    return merged, (out, lse, merged, comm)


def _reduce_lse_backward(backend, axis_name, wire_dtype, residuals, cotangents):
    """The merged ``out`` is ``sum(w_i out_i)`` with ``w_i = exp(lse_i - lse)``."""
    out, lse, (merged_out, merged_lse), comm = residuals
    dout, dlse = cotangents
    rest = dlse - jnp.sum(dout * merged_out, axis=-1)
    moved = _cast(
        backend, axis_name, [dout.astype(wire_dtype or out.dtype), rest, merged_lse], comm
    )
    dout, rest, merged_lse = moved
    dtype = sum_dtype(out.dtype)
    # No weight exceeds 1; the bound keeps rows that nobody sends (where merged_lse reads 0) finite.
    weight = jnp.exp(jnp.minimum(lse.astype(dtype) - merged_lse, 0.0))
    weight = jnp.where(lse > -jnp.inf, weight, 0.0)
    dout = dout.astype(dtype)
    dlse = weight * (jnp.sum(dout * out.astype(dtype), axis=-1) + rest)
    return (weight[..., None] * dout).astype(out.dtype), dlse.astype(lse.dtype), None


_reduce_lse.defvjp(_reduce_lse_forward, _reduce_lse_backward)
