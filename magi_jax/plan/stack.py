"""Plans of several replicas as one."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from magi_jax.plan.attention_plan import AttentionPlan


def stack_plans(plans: Sequence[AttentionPlan]) -> AttentionPlan:
    """Stacks plans of one spec along a new leading replica axis: leaves ``[replicas, cp, ...]``.

    ``planning_ms`` is that of all plans together.

    Args:
        plans: one plan per replica (group of ranks that shares a sequence), in the order of the
            batch axis.

    Raises:
        TypeError: one of them is no plan, or a plan is given instead of several.
        ValueError: no plan is given, or the specs differ.
    """
    if isinstance(plans, AttentionPlan):
        raise TypeError("stack_plans takes one plan for each replica, such as [plan]; got a plan")
    for i, plan in enumerate(plans):
        if not isinstance(plan, AttentionPlan):
            raise TypeError(f"plan {i} must be an AttentionPlan, got {type(plan).__name__}")
    if not plans:
        raise ValueError("stack_plans needs at least one plan")
    for i, plan in enumerate(plans):
        if plan.spec != plans[0].spec:
            problem = plans[0].spec.shortfall(plan.spec) or plan.spec.shortfall(plans[0].spec)
            raise ValueError(
                f"plan {i} and plan 0 have different specs: {problem}; plan all with one spec"
            )
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *plans)
    times_ms = [plan.planning_ms for plan in plans if plan.planning_ms is not None]
    return dataclasses.replace(stacked, planning_ms=sum(times_ms) if times_ms else None)
