"""`dispatch`, `undispatch`, `roll` and `positions`: tokens between their own order and the plan's.

All take a pytree whose leaves have the sequence on one axis, in one of three forms:

- NumPy arrays with a NumPy plan, as in a data loader: whole sequences, and no device is touched;
- whole device arrays, under a mesh (that of the context, or ``mesh=``);
- the local rows of one rank, inside a `shard_map` that is manual over ``axis_name``.

A stacked plan has a replica for each row of axis 0, and the sequence is on axis 1.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from magi_jax.parallel import host_tokens
from magi_jax.parallel import region as regions
from magi_jax.parallel.moves import Move, move_tokens, other_axis
from magi_jax.plan import AttentionPlan, local_part

AnyMesh = Mesh | AbstractMesh | None


def dispatch(
    x: Any,
    plan: AttentionPlan,
    axis_name: str = "cp",
    *,
    axis: int | None = None,
    mesh: AnyMesh = None,
    spec: P | None = None,
) -> Any:
    """Moves tokens from their own order to where the plan wants them; exact, also under grad.

    Args:
        x: pytree of arrays of any dtype with ``seq_len`` rows on ``axis``. Inside a `shard_map`:
            the ``ceil(seq_len / cp)`` rows of a rank; what it holds past ``seq_len`` is never read.
        plan: the plan, or a stacked plan.
        axis_name: mesh axis that rows are sharded over.
        axis: the sequence axis of every leaf; None is 0, or 1 for a stacked plan.
        mesh: the mesh, for device arrays where the context has none.
        spec: how device arrays are sharded over automatic mesh axes other than ``axis_name``;
            needed where there are any, since XLA would gather what it does not know to be sharded.

    Returns:
        The pytree with ``cp * local_len`` rows, or the ``local_len`` of the rank inside a
        `shard_map`. Padding rows are zero.

    Raises:
        TypeError: a leaf is no array.
        ValueError: wrong number of rows, no mesh, or a mesh that does not fit the plan.
    """
    axis = _sequence_axis(plan, axis)
    if _on_host(x, plan, axis_name):
        return _on_each(host_tokens.dispatch, "dispatch", x, plan, axis, plan.spec.seq_len)
    sizes = plan.spec
    move = Move(
        name="dispatch",
        region=_region(axis_name, mesh, "dispatch"),
        axis=axis,
        stacked=plan.positions.ndim == 3,
        local_rows=(plan.dispatch.transfer.src_rows, sizes.local_len),
        total_rows=(sizes.seq_len, sizes.cp_size * sizes.local_len),
        backwards=False,
    )
    return move_tokens(move, x, plan.dispatch.transfer, spec)


def undispatch(
    x: Any,
    plan: AttentionPlan,
    axis_name: str = "cp",
    *,
    axis: int | None = None,
    mesh: AnyMesh = None,
    spec: P | None = None,
) -> Any:
    """Moves tokens back to their own order: the inverse of `dispatch`, with its arguments.

    Returns:
        The pytree with ``seq_len`` rows, or the ``ceil(seq_len / cp)`` of the rank inside a
        `shard_map`, zero past the end. Where axes are explicit and ranks' shares uneven, rows are
        not sharded.
    """
    axis = _sequence_axis(plan, axis)
    sizes = plan.spec
    dispatched = sizes.cp_size * sizes.local_len
    if _on_host(x, plan, axis_name):
        return _on_each(
            lambda leaf, positions, axis: host_tokens.undispatch(
                leaf, positions, sizes.seq_len, axis
            ),
            "undispatch",
            x,
            plan,
            axis,
            dispatched,
        )
    move = Move(
        name="undispatch",
        region=_region(axis_name, mesh, "undispatch"),
        axis=axis,
        stacked=plan.positions.ndim == 3,
        local_rows=(sizes.local_len, plan.dispatch.transfer.src_rows),
        total_rows=(dispatched, sizes.seq_len),
        backwards=True,
    )
    return move_tokens(move, x, plan.dispatch.transfer, spec)


def roll(
    x: Any,
    plan: AttentionPlan,
    shift: int,
    axis_name: str = "cp",
    *,
    axis: int | None = None,
    mesh: AnyMesh = None,
    spec: P | None = None,
) -> Any:
    """Shifts dispatched tokens along their sequence, as if undispatched in between; exact.

    Only rows that change ranks travel. Nothing wraps: what would come from outside the sequence is
    zero, so ``roll(tokens, plan, -1)`` gives each token its successor and the last one zero.

    Args:
        x: pytree of dispatched arrays.
        plan: the plan, or a stacked plan; it holds a transfer for each of `PlanConfig.roll_shifts`.
        shift: position ``p`` gets what was at ``p - shift``. NumPy arrays take any shift.
        axis_name: mesh axis that rows are sharded over.
        axis: the sequence axis of every leaf; None is 0, or 1 for a stacked plan.
        mesh: as for `dispatch`.
        spec: as for `dispatch`.

    Returns:
        The pytree with the same shapes.

    Raises:
        ValueError: ``shift`` was not planned; or as for `dispatch`.
    """
    axis = _sequence_axis(plan, axis)
    sizes = plan.spec
    dispatched = sizes.cp_size * sizes.local_len
    if _on_host(x, plan, axis_name):
        return _on_each(
            lambda leaf, positions, axis: host_tokens.roll(
                leaf, positions, sizes.seq_len, shift, axis
            ),
            "roll",
            x,
            plan,
            axis,
            dispatched,
        )
    if shift not in sizes.roll_shifts:
        raise ValueError(
            f"the plan has no transfer for a roll by {shift}; it has {sizes.roll_shifts}, from"
            " PlanConfig.roll_shifts"
        )
    move = Move(
        name="roll",
        region=_region(axis_name, mesh, "roll"),
        axis=axis,
        stacked=plan.positions.ndim == 3,
        local_rows=(sizes.local_len, sizes.local_len),
        total_rows=(dispatched, dispatched),
        backwards=False,
    )
    return move_tokens(move, x, plan.rolls[sizes.roll_shifts.index(shift)], spec)


def positions(plan: AttentionPlan, axis_name: str = "cp", *, mesh: AnyMesh = None) -> Any:
    """Global position of each dispatched row, int32, -1 in padding.

    Returns:
        ``[cp * local_len]``, NumPy for a NumPy plan; ``[local_len]`` inside a `shard_map` that is
        manual over ``axis_name``; with a leading axis of replicas for a stacked plan.
    """
    x = plan.positions
    if isinstance(x, np.ndarray) and not _is_manual(axis_name):
        return x.reshape(*x.shape[:-2], -1)
    region = regions.find_region(axis_name, mesh, "positions")
    if not region.is_local:
        return x.reshape(*x.shape[:-2], -1)
    rank = jax.lax.axis_index(axis_name)
    one = functools.partial(local_part, rank=rank, cp_size=plan.cp_size, lead=1)
    return jax.vmap(one)(x) if x.ndim == 3 else one(x)


def _region(axis_name: str, mesh: AnyMesh, caller: str) -> regions.Region:
    return regions.find_region(
        axis_name, mesh, caller, "; NumPy arrays under a plan of NumPy arrays need none"
    )


def _sequence_axis(plan: AttentionPlan, axis: int | None) -> int:
    if not isinstance(plan, AttentionPlan):
        raise TypeError(f"plan must be an AttentionPlan, got {type(plan).__name__}")
    stacked = plan.positions.ndim == 3
    axis = int(stacked) if axis is None else axis
    if axis < stacked:
        raise ValueError(
            "axis must count from the front and, for a stacked plan, come after the replicas; got"
            f" {axis}"
        )
    return axis


def _is_manual(axis_name: str) -> bool:
    return axis_name in jax.sharding.get_abstract_mesh().manual_axes


def _on_host(x: Any, plan: AttentionPlan, axis_name: str) -> bool:
    leaves = [*jax.tree.leaves(x), plan.positions]
    for leaf in leaves:
        if not hasattr(leaf, "shape"):
            raise TypeError(
                f"tokens are a pytree of arrays; got {leaf!r} as one of its leaves, as of a list"
                " that np.asarray has not made an array"
            )
    return all(isinstance(leaf, np.ndarray) for leaf in leaves) and not _is_manual(axis_name)


def _on_each(
    move: Callable, name: str, x: Any, plan: AttentionPlan, axis: int, num_rows: int
) -> Any:
    """A NumPy move on every leaf, and on every replica of a stacked plan."""
    table = positions(plan)

    def one(path, leaf):
        if leaf.ndim <= axis or leaf.shape[axis] != num_rows:
            of_leaf = f" of {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(
                f"{name} needs {num_rows} rows on axis {axis}{of_leaf}, got shape {leaf.shape}"
                f"{other_axis(leaf.shape, num_rows)}"
            )
        if table.ndim == 1:
            return move(leaf, table, axis)
        if leaf.shape[0] != len(table):
            raise ValueError(
                f"{name}: the stacked plan has {len(table)} replicas, axis 0 of shape {leaf.shape}"
                f" has {leaf.shape[0]}"
            )
        return np.stack([move(*both, axis - 1) for both in zip(leaf, table, strict=True)])

    return jax.tree.map_with_path(one, x)
