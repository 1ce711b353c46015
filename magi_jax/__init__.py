"""Attention for JAX, exact for any union of band slices, over sequences sharded across a mesh axis.

The public names live here and are loaded when first used: importing ``magi_jax.masks`` or
``magi_jax.solver`` loads NumPy alone, so that a data-loading process can plan without JAX.
``magi_jax.flax`` and ``magi_jax.data`` are loaded in the same way and need the extras of their
name.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magi_jax import comm, data, flax, masks, testing
    from magi_jax.comm import group_cast, group_reduce
    from magi_jax.masks import AttnMask, AttnSlice, MaskType
    from magi_jax.ops import (
        block_sparse_table,
        build_info,
        dot_product_attention,
        flex_flash_attention,
    )
    from magi_jax.parallel import DistOptions, dispatch, roll, undispatch
    from magi_jax.parallel.dist_attention import dist_attention
    from magi_jax.plan import AttentionPlan, PlanConfig, PlanSpec, make_plan, stack_plans
    from magi_jax.plan.slice_table import slice_table
    from magi_jax.solver.cost.machine import Machine
    from magi_jax.solver.cost.model import CostModel

__version__ = "0.1.0"

__all__ = [
    "AttentionPlan",
    "AttnMask",
    "AttnSlice",
    "CostModel",
    "DistOptions",
    "Machine",
    "MaskType",
    "PlanConfig",
    "PlanSpec",
    "block_sparse_table",
    "build_info",
    "comm",
    "data",
    "dispatch",
    "dist_attention",
    "dot_product_attention",
    "flax",
    "flex_flash_attention",
    "group_cast",
    "group_reduce",
    "make_plan",
    "masks",
    "roll",
    "slice_table",
    "stack_plans",
    "testing",
    "undispatch",
]

_SUBPACKAGES = ("comm", "data", "flax", "masks", "testing")

_NAMES_OF = {
    "masks": ("AttnMask", "AttnSlice", "MaskType"),
    "plan": (
        "AttentionPlan",
        "PlanConfig",
        "PlanSpec",
        "make_plan",
        "slice_table",
        "stack_plans",
    ),
    "ops": (
        "block_sparse_table",
        "build_info",
        "dot_product_attention",
        "flex_flash_attention",
    ),
    "comm": ("group_cast", "group_reduce"),
    "parallel": ("DistOptions", "dispatch", "dist_attention", "roll", "undispatch"),
    "solver.cost.machine": ("Machine",),
    "solver.cost.model": ("CostModel",),
}

_HOME = {name: home for home, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"magi_jax.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"magi_jax.{_HOME[name]}"), name)
    raise AttributeError(f"module 'magi_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
