"""What JAX knows about a value inside a `shard_map`: its manual mesh axes and their sizes."""

from magi_jax.mesh.manual_axes import (
    make_varying,
    manual_axis_size,
    result_type,
    unify_varying,
    varying_axes,
)

__all__ = ["make_varying", "manual_axis_size", "result_type", "unify_varying", "varying_axes"]
