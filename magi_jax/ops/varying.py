"""Types of values inside `shard_map`: results of custom calls vary over the axes that their operands do.

With ``check_vma=True`` JAX tracks over which manual mesh axes a value differs between devices. A custom
call knows nothing of that, and a result that lost it breaks the carry of a scan. So operands are brought to
one common type, and results are declared with it. Where nothing is tracked, all this does nothing.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def varying_axes(tree: Any) -> frozenset[str]:
    """Manual mesh axes over which any leaf of ``tree`` varies."""
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def unify(*trees: Any) -> Any:
    """Lets all leaves of all ``trees`` vary over the axes that any of them varies over.

    Differentiable: the cotangent of a value that was the same on all devices of an axis is summed over it.
    """
    union = varying_axes(trees)

    def widen(leaf):
        missing = tuple(sorted(union - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(widen, trees)


def result(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
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
