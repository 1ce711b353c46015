"""Group collectives in two steps, so that no row crosses a border between nodes twice.

A cast takes each row once to every node that needs it, to the rank there with the owner's place in the
node (GPUs with the same place share the rail of a network), and from there over the node's own link to
those who need it. A reduce takes the same way back: results are combined in the node, in the order of
its ranks, before anything leaves it, and then at the owner in the order of nodes, its own last.

Both steps are ordinary transfers, so every transport serves them and derivatives are theirs. Tables are
those of a plan with `PlanConfig.ranks_per_node`, or made from others by `two_level`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from magi_jax.comm.group_collectives import group_cast, group_reduce
from magi_jax.comm.transport import Transport
from magi_jax.plan import AnyComm, CommMeta, TwoLevelComm
from magi_jax.plan.two_level import in_two_steps


def two_level(comm: CommMeta, ranks_per_node: int) -> TwoLevelComm:
    """Splits a concrete transfer with leaves ``[cp, L, 5]`` into two steps of the same effect.

    Raises:
        ValueError: nodes do not divide the ranks.
    """
    return in_two_steps(comm, ranks_per_node)


def cast_in_steps(
    x: Any, comm: AnyComm, axis_name: str, *, transport: str | Transport | None = None
) -> Any:
    """`group_cast` in as many steps as ``comm`` has; arguments, result and errors are those of
    `group_cast`.
    """
    for step in comm.steps:
        x = group_cast(x, step, axis_name, transport=transport)
    return x


def reduce_in_steps(
    y: Any,
    comm: AnyComm,
    axis_name: str,
    *,
    op: str = "sum",
    wire_dtype: Any = None,
    out_dtype: Any = None,
    transport: str | Transport | None = None,
) -> Any:
    """`group_reduce` in as many steps as ``comm`` has; arguments and result are those of `group_reduce`.

    What a node has combined is float32 where all leaves are floating, and travels on in ``wire_dtype``; None
    keeps it in float32.
    """
    options = {"op": op, "wire_dtype": wire_dtype, "transport": transport}
    if len(comm.steps) == 1:
        return group_reduce(y, comm.steps[0], axis_name, out_dtype=out_dtype, **options)
    if any(not jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(y)):
        between = None  # booleans and integers stay as they are
    else:
        between = jnp.float32
    combined = y
    for step in reversed(comm.steps):
        combined = group_reduce(combined, step, axis_name, out_dtype=between, **options)
    return jax.tree.map(lambda leaf, x: x.astype(out_dtype or leaf.dtype), y, combined)
