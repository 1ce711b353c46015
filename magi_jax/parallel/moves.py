"""Moving rows of device arrays between layouts, each exactly once: whole arrays or local rows."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax.comm import group_cast, group_reduce
from magi_jax.comm.cotangents import floating_cotangents
from magi_jax.mesh import make_varying, varying_axes
from magi_jax.parallel import region as regions
from magi_jax.parallel.region import Region
from magi_jax.plan import CommMeta


@dataclass(frozen=True)
class Move:
    """A move of rows along a transfer of a plan. Hashable.

    Attributes:
        name: the public function that asks.
        region: the mesh around it.
        axis: the sequence axis of every leaf.
        stacked: whether the transfer has a replica for each row of axis 0.
        local_rows: rows of each rank, before and after.
        total_rows: rows of all ranks that hold tokens or padding of the layout, before and after.
        backwards: whether rows go from the transfer's destination to its source.
    """

    name: str
    region: Region
    axis: int
    stacked: bool
    local_rows: tuple[int, int]
    total_rows: tuple[int, int]
    backwards: bool


def move_tokens(move: Move, x: Any, comm: CommMeta, spec: P | None) -> Any:
    """Carries out a move on every leaf of ``x``; see `magi_jax.parallel.tokens`.

    Args:
        move: what to do.
        x: pytree of arrays.
        comm: the transfer, with its ``[cp]`` or ``[replicas, cp]`` axes.
        spec: sharding of the leaves over automatic axes.

    Raises:
        ValueError: leaves with other numbers of rows, or a sharding that is not known.
    """
    leaves, treedef = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    for leaf in leaves:
        _check_leaf(move, leaf, comm)
    if not leaves:
        return x
    entries = [_sharding(move, leaf, spec) for leaf in leaves]
    specs = tuple(P(*entry) for entry in entries)
    lead = (entries[0][0],) if move.stacked else ()
    rows = () if move.region.is_local else (move.region.axis_name,)
    static = _Sharded(move, P(*lead, rows), specs)
    comm = regions.reshard(move.region, comm, static.comm_spec)
    if move.region.is_local:
        axes = varying_axes((leaves, comm)) | {move.region.axis_name}
        leaves = make_varying(leaves, axes)
    else:
        leaves = [_enter(move, leaf, s) for leaf, s in zip(leaves, specs, strict=True)]
    moved = _moved(static, leaves, comm)
    if not move.region.is_local:
        moved = [_leave(move, leaf) for leaf in moved]
    return jax.tree.unflatten(treedef, moved)


@dataclass(frozen=True)
class _Sharded:
    """A move with the shardings of the tables and of each leaf over open axes. Hashable."""

    move: Move
    comm_spec: P
    specs: tuple[P, ...]

    def reversed(self, chosen: list[bool]) -> "_Sharded":
        """The way back of some of the leaves: the transpose."""
        return _Sharded(
            dataclasses.replace(self.move, backwards=not self.move.backwards),
            self.comm_spec,
            tuple(spec for spec, wanted in zip(self.specs, chosen, strict=True) if wanted),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moved(sharded, leaves, comm):
    return _carry_out(sharded, leaves, comm)


def _moved_forward(sharded, leaves, comm):
    return _carry_out(sharded, leaves, comm), comm


def _moved_backward(sharded, comm, cotangents):
    floating = [g.dtype != jax.dtypes.float0 for g in cotangents]
    back = sharded.reversed(floating)
    return floating_cotangents(lambda some: _carry_out(back, some, comm), cotangents), None


_moved.defvjp(_moved_forward, _moved_backward)


@functools.partial(jax.jit, static_argnums=0)
def _carry_out(sharded: _Sharded, leaves: list[jax.Array], comm: CommMeta) -> list[jax.Array]:
    """The move on padded whole arrays or local rows."""
    move = sharded.move
    axis = move.axis - move.stacked
    collective = group_reduce if move.backwards else group_cast

    def exchange(leaves, comm):
        rows_first = [jnp.moveaxis(leaf, axis, 0) for leaf in leaves]
        moved = collective(rows_first, comm, move.region.axis_name)
        return [jnp.moveaxis(leaf, 0, axis) for leaf in moved]

    def body(leaves, comm):
        if move.stacked:
            return regions.in_turns(exchange, leaves, comm)
        return exchange(leaves, comm)

    specs = list(sharded.specs)
    return regions.run(
        move.region, body, (leaves, comm), in_specs=(specs, sharded.comm_spec), out_specs=specs
    )


def other_axis(shape: tuple[int, ...], rows: int) -> str:
    """What to add to a message about a wrong number of rows where another axis has that many."""
    return f"; say axis={shape.index(rows)} if tokens are on that one" if rows in shape else ""


def _check_leaf(move, leaf, comm):
    if comm.spec.cp_size != move.region.cp_size:
        raise ValueError(
            f"{move.name}: the plan is for {comm.spec.cp_size} ranks, but mesh axis"
            f" {move.region.axis_name!r} has {move.region.cp_size}"
        )
    where = "each rank's local rows" if move.region.is_local else "the whole array"
    rows = (move.local_rows if move.region.is_local else move.total_rows)[0]
    if leaf.ndim <= move.axis or leaf.shape[move.axis] != rows:
        raise ValueError(
            f"{move.name} needs {rows} rows on axis {move.axis} of {where}, got shape {leaf.shape}"
            f"{other_axis(leaf.shape, rows)}"
        )
    if move.stacked and leaf.shape[0] != comm.send.shape[0]:
        raise ValueError(
            f"{move.name}: the stacked plan has {comm.send.shape[0]} replicas here, axis 0 of shape"
            f" {leaf.shape} has {leaf.shape[0]}"
        )


def _sharding(move: Move, leaf: jax.Array, spec: P | None) -> list[tuple[str, ...]]:
    """Open axes over which each dimension of a leaf is sharded, rows as they will be."""
    region = move.region
    entries = regions.explicit_entries(region, leaf)
    given = _automatic_entries(region, leaf, spec, move.name)
    for dim, axes in enumerate(given[: leaf.ndim]):
        others = [a for a in axes if a != region.axis_name]
        entries[dim] += tuple(a for a in others if a in region.automatic_axes)
    entries[move.axis] = () if region.is_local else (region.axis_name,)
    return entries


def _automatic_entries(region, leaf, spec, name):
    """Sharding over automatic axes: as told, or that of a concrete array."""
    others = [a for a in region.automatic_axes if a != region.axis_name and region.sizes[a] > 1]
    if not others:
        return []
    if spec is None and not isinstance(leaf, jax.core.Tracer):
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
    if spec is None:
        raise ValueError(
            f"{name}: the sharding of an array of shape {leaf.shape} over the automatic mesh axes"
            f" {others} is not known here: pass spec=, a PartitionSpec (P() if it is replicated over them)"
        )
    entries = [regions.as_tuple(entry) for entry in spec]
    regions.check_axes(
        region, tuple(a for e in entries for a in e if a != region.axis_name), "spec"
    )
    return entries


def _enter(move: Move, leaf: jax.Array, spec: P) -> jax.Array:
    """Pads whole arrays so that all ranks have the same number of rows."""
    missing = move.local_rows[0] * move.region.cp_size - leaf.shape[move.axis]
    if missing:
        # A type cannot say that rows are sharded unevenly, so those of this array are not sharded.
        widths = [(0, missing if dim == move.axis else 0) for dim in range(leaf.ndim)]
        leaf = jnp.pad(leaf, widths)
    return regions.reshard(move.region, leaf, spec)


def _leave(move: Move, leaf: jax.Array) -> jax.Array:
    """Drops the rows that only make all ranks equal."""
    rows = move.total_rows[1]
    if leaf.shape[move.axis] == rows:
        return leaf
    if move.region.explicit_axes:
        entries = regions.explicit_entries(move.region, leaf)
        entries[move.axis] = ()
        leaf = regions.reshard(move.region, leaf, P(*entries))
    return jax.lax.slice_in_dim(leaf, 0, rows, axis=move.axis)
