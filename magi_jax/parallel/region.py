"""How a call sits in its mesh, and running code where every mesh axis is manual.

A custom call that XLA partitions by itself gets its operands all-gathered, and so does an
`all_to_all` that is manual over one axis only: over all the others. So everything of this layer
runs where all axes are manual. Inside a user's `shard_map` some are already; the rest are opened
here by a nested one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from magi_jax.mesh import make_varying, varying_axes

AxisNames = str | Sequence[str] | None


@dataclass(frozen=True)
class Region:
    """The mesh around a call. Hashable.

    Attributes:
        axis_name: the context-parallel axis.
        shape: size of every mesh axis, by name.
        types: type of every axis that is not manual yet, by name; these get opened.
        mesh: what `shard_map` is to be told; None where the context has the mesh.
    """

    axis_name: str
    shape: tuple[tuple[str, int], ...]
    types: tuple[tuple[str, AxisType], ...]
    mesh: Mesh | AbstractMesh | None

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every mesh axis."""
        return dict(self.shape)

    @property
    def open_axes(self) -> tuple[str, ...]:
        """Axes that are not manual yet, in the order of the mesh."""
        return tuple(name for name, _ in self.types)

    @property
    def explicit_axes(self) -> frozenset[str]:
        """Open axes whose sharding is part of the type of an array."""
        return frozenset(name for name, kind in self.types if kind == AxisType.Explicit)

    @property
    def automatic_axes(self) -> tuple[str, ...]:
        """Open axes whose sharding XLA chooses."""
        return tuple(name for name, kind in self.types if kind == AxisType.Auto)

    @property
    def is_local(self) -> bool:
        """Whether the caller holds the rows of one rank only."""
        return self.axis_name not in self.open_axes

    @property
    def platform(self) -> str | None:
        """That of the devices of a given mesh; None where the mesh is that of the context."""
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, Mesh) else None

    @property
    def cp_size(self) -> int:
        """Size of the context-parallel axis."""
        return self.sizes[self.axis_name]


def find_region(
    axis_name: str, mesh: Mesh | AbstractMesh | None, caller: str, otherwise: str = ""
) -> Region:
    """Reads the mesh of the context, or takes the given one. ``otherwise`` says how to do without one.

    Raises:
        TypeError: ``axis_name`` is no name.
        ValueError: there is no mesh, two different ones, or none of its axes is ``axis_name``.
    """
    if not isinstance(axis_name, str):
        raise TypeError(
            f"{caller} takes the name of a mesh axis as axis_name=, and a mesh as mesh=; got"
            f" axis_name={axis_name!r}"
        )
    context = jax.sharding.get_abstract_mesh()
    if context.empty and mesh is None:
        raise ValueError(
            f"{caller} finds no mesh: call it inside `with jax.set_mesh(mesh):` or a shard_map, or"
            f" pass mesh= (a legacy `with mesh:` block is not visible to it){otherwise}"
        )
    if mesh is not None and not context.empty and dict(mesh.shape) != dict(context.shape):
        raise ValueError(
            f"{caller} got mesh={dict(mesh.shape)}, but the context has {dict(context.shape)}"
        )
    around = context if mesh is None or not context.empty else mesh
    if axis_name not in around.axis_names:
        raise ValueError(
            f"{caller} got axis_name={axis_name!r}, which is no axis of the mesh"
            f" {dict(around.shape)}; say which one shards rows, axis_name=..."
        )
    types = zip(around.axis_names, around.axis_types, strict=True)
    return Region(
        axis_name=axis_name,
        shape=tuple(around.shape.items()),
        types=tuple((name, kind) for name, kind in types if kind != AxisType.Manual),
        mesh=mesh if context.empty else None,
    )


def run(region: Region, fn: Callable, args: tuple, in_specs: Any, out_specs: Any) -> Any:
    """``fn(*args)`` where every mesh axis is manual and varying axes are not tracked.

    Specs speak of open axes only. What comes back varies over every axis that any argument varies
    over.
    """
    union = varying_axes(args)
    # Without open axes a nested shard_map over all of them changes no shape; it only ends the
    # tracking, which custom calls and loop carries inside would not satisfy.
    names = region.open_axes or tuple(name for name, _ in region.shape)
    inner = jax.shard_map(
        lambda *args: fn(*_forget_varying(args)),
        mesh=region.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(names),
        check_vma=False,
    )
    try:
        results = inner(*args)
    except ValueError as error:
        # All names are axes of the context; which of them a vmap has taken, JAX alone knows.
        if not str(error).startswith("jax.shard_map requires axis_names="):
            raise
        raise NotImplementedError(
            "jax.vmap over an axis that is sharded over one of the explicit mesh axes"
            f" {sorted(region.explicit_axes)} keeps that one from being opened; give the call the whole"
            " batch instead, [B, T, ...]"
        ) from error
    return make_varying(results, union)


def _forget_varying(tree: Any) -> Any:
    """The same values, without the axes of an outer `shard_map` over which JAX knows them to vary.

    Arguments bring that along into a `shard_map` that does not track it, where custom calls and
    `pcast` then trip over it. Results of operations there do not have it, so a shape is changed and
    changed back, which costs nothing.
    """
    return jax.tree.map(
        lambda x: jax.lax.squeeze(jax.lax.expand_dims(x, (0,)), (0,)) if varying_axes(x) else x,
        tree,
    )


def as_tuple(axes: AxisNames) -> tuple[str, ...]:
    """One name or several as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def check_axes(region: Region, axes: tuple[str, ...], name: str) -> None:
    """Refuses axes that the mesh lacks, and the context-parallel axis, which shards rows."""
    for axis in axes:
        if axis not in region.sizes or axis == region.axis_name:
            raise ValueError(
                f"{name} names {axis!r}; it must name axes of the mesh {region.sizes} other than"
                f" {region.axis_name!r}"
            )


def explicit_entries(region: Region, x: jax.Array) -> list[tuple[str, ...]]:
    """Open explicit axes over which each dimension of ``x`` is sharded, from its type."""
    sharding = jax.typeof(x).sharding
    entries = [as_tuple(entry) for entry in sharding.spec]
    entries += [()] * (x.ndim - len(entries))
    return [tuple(axis for axis in entry if axis in region.explicit_axes) for entry in entries]


def reshard(region: Region, tree: Any, spec: PartitionSpec) -> Any:
    """Gives arrays the sharding over explicit axes that `run` will ask for; that over others is XLA's."""
    if not region.explicit_axes:
        return tree
    kept = [tuple(a for a in as_tuple(entry) if a in region.explicit_axes) for entry in spec]
    spec = PartitionSpec(*kept)
    target = spec if region.mesh is None else NamedSharding(region.mesh, spec)
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, target), tree)


def in_turns(fn: Callable, arrays: Any, tables: Any) -> Any:
    """``fn(arrays[b], tables[b])`` for each index ``b`` of the leading axis, stacked."""
    if jax.tree.leaves(arrays)[0].shape[0] == 1:
        first = jax.tree.map(lambda x: x[0], (arrays, tables))
        return jax.tree.map(lambda x: x[None], fn(*first))
    return jax.lax.map(lambda both: fn(*both), (arrays, tables))
