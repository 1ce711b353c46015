"""Types of values inside `shard_map`: over which mesh axes they vary, and how to make them vary.

With ``check_vma=True`` JAX tracks the manual axes over which a value differs between devices. A
custom call loses that, and a scan whose carry enters as one type and leaves as another is refused;
so values are brought to a common type at the border of every function here. Where nothing is
tracked, this does nothing.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def varying_axes(tree: Any) -> frozenset[str]:
    """Manual mesh axes over which any leaf of ``tree`` varies; empty where that is not tracked."""
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def make_varying(tree: Any, axes: frozenset[str]) -> Any:
    """Lets every leaf of ``tree`` vary over ``axes`` as well; values stay what they are."""

    def widen(leaf):
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(widen, tree)


def unify_varying(*trees: Any) -> Any:
    """Lets all leaves of all ``trees`` vary over the axes that any of them varies over.

    Differentiable: the cotangent of a value that was the same on all devices of an axis is summed
    over it.
    """
    return make_varying(trees, varying_axes(trees))


def result_type(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Type of a custom call's result that varies over the same axes as its operand ``like``."""
    operand = jax.typeof(like)
    mesh = operand.sharding.mesh
    if mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype)
    # Only a type that knows its mesh can say over which of its axes it varies.
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=sharding, manual_axis_type=operand.manual_axis_type
    )


def manual_axis_size(axis_name: str, function: str) -> int:
    """Size of a manual mesh axis.

    Args:
        axis_name: the axis.
        function: who asks, for the error.

    Raises:
        ValueError: no `shard_map` around the caller is manual over ``axis_name``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.manual_axes:
        raise ValueError(
            f"{function} moves rows between the ranks of a mesh axis and must be called inside a"
            " shard_map that"
            f" is manual over it; got axis_name={axis_name!r}, manual axes here: {mesh.manual_axes}"
        )
    return mesh.shape[axis_name]
