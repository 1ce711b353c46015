"""`dist_attention`: exact attention over tokens that are sharded across a mesh axis."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from magi_jax.comm.group_collectives import get_transport
from magi_jax.mesh import make_varying, varying_axes
from magi_jax.ops import CONTEXT_NAME, get_implementation
from magi_jax.ops.api import settled_logits
from magi_jax.ops.head_groups import by_head_groups
from magi_jax.ops.implementations import platform_of
from magi_jax.parallel import batch
from magi_jax.parallel.operands import (
    Specs,
    check_group_plans,
    check_operands,
    check_plan,
    check_shapes,
    find_specs,
)
from magi_jax.parallel.options import DistOptions
from magi_jax.parallel.region import Region, find_region, reshard, run
from magi_jax.parallel.stages import Stages
from magi_jax.plan import AttentionPlan

# With `CONTEXT_NAME`, a name for `jax.checkpoint_policies.save_only_these_names`.
REMOTE_KV_NAME = "remote_kv"


def dist_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: AttentionPlan | Sequence[AttentionPlan],
    axis_name: str = "cp",
    *,
    mesh: Mesh | AbstractMesh | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_residual: bool = False,
    return_max_logits: bool = False,
    options: DistOptions | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attention under the mask of ``plan``, exact, with queries, keys and values sharded by rows.

    Inside a `shard_map` that is manual over ``axis_name``, arrays hold the ``local_len`` rows of
    one rank; outside, they hold ``cp * local_len`` rows, sharded over ``axis_name``. Rows are those
    that `dispatch` gives. Mesh axes that are not manual yet are opened here: where they are
    explicit, their use is read from the types of the arrays; where they are automatic, name it in
    ``options``: ``DistOptions(batch_axes="dp", head_axes="tp")``, or XLA would gather what it does not
    know to be sharded.

    Partial results of stages are merged in float32.

    Under ``check_vma=False`` JAX itself scales the gradient of a loss that is psum'ed inside a
    `shard_map` by the size of the axis; keep ``check_vma=True`` (the default), or take the gradient
    outside.

    Args:
        q: ``[T, N, H]`` or ``[B, T, N, H]``, floating.
        k: ``[S, K, H]`` or ``[B, S, K, H]``, dtype of q; N is a multiple of K. S is T but for
            cross-attention (`AttentionPlan.with_mask` with ``keys``), where keys have the rows that
            their own plan gives them, or are whole on every rank.
        v: ``[S, K, Hv]`` or ``[B, S, K, Hv]``, dtype of q.
        plan: one plan for all sequences, or a stacked plan with a replica for each. Inside a
            `shard_map` its leaves may be sharded over ``axis_name`` or whole. A sequence of G plans on
            one dispatch (`AttentionPlan.with_mask`) is for G equal groups of neighbouring kv heads and
            the query heads that read them; heads must not be sharded over axes that are opened here.
        axis_name: mesh axis that rows are sharded over.
        mesh: the mesh, where the context has none.
        scale: factor of the logits; None is ``H ** -0.5``.
        logits_soft_cap: logits become ``cap * tanh(logits / cap)``; None for no cap.
        sinks: ``[N]``, or ``[X, N]`` for several: logits that join the softmax of every row of
            their head and have no value.
        return_residual: whether to return the log-sum-exp too.
        return_max_logits: whether to return the largest logits too.
        options: how and where it runs, see `DistOptions`; None takes the defaults.

    Returns:
        ``out`` with the leading axes of q and last axis Hv, in the dtype of q; rows that see no key
        are zero. With ``return_residual`` also ``lse``, float32, the shape of ``out`` without its last
        axis; -inf in rows that see no key. With ``return_max_logits`` then ``max_logits [N]``,
        float32: the largest logit of each head, after scale and cap, over all cells that the mask
        shows on any rank and in any sequence of ``batch_axes`` (QK-clip reads it); over batch axes
        that are manual already it is the caller's to reduce. It has no derivative.

    Raises:
        TypeError: ``plan`` is a mask or a table, ``options`` are none, or ``scale`` or ``logits_soft_cap``
            is traced.
        ValueError: shapes, dtypes, the plan and the mesh do not fit each other.
        NotImplementedError: the implementation does not support the case.
    """
    options = DistOptions() if options is None else options
    check_plan(plan)
    if not isinstance(options, DistOptions):
        raise TypeError(f"options must be DistOptions, got {type(options).__name__}")
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    sinks = None if sinks is None else jnp.asarray(sinks)
    region = find_region(axis_name, mesh, "dist_attention")
    check_shapes(q, k, v)
    logits = settled_logits(scale, logits_soft_cap, q.shape[-1])

    def attend(q, k, v, sinks, plan):
        specs = find_specs(region, (q, k, v, sinks), plan, options.batch_axes, options.head_axes)
        check_operands(region, specs, (q, k, v, sinks), plan)
        stages = Stages(
            implementation=get_implementation(
                options.implementation,
                deterministic=options.deterministic,
                platform=region.platform or platform_of(q),
            ),
            axis_name=axis_name,
            scale=logits[0],
            logits_soft_cap=logits[1],
            transport=get_transport(options.transport),
            reduce_dtype=options.reduce_dtype,
            keep_remote_kv=options.keep_remote_kv,
            with_max_logits=return_max_logits,
            # Ranks that all hold the keys each have a part of their gradient.
            shared_key_axes=specs.rows if specs.keys_replicated else (),
        )
        return _attend(_Call(region, specs, stages), (q, k, v, sinks), plan)

    if isinstance(plan, AttentionPlan):
        results = attend(q, k, v, sinks, plan)
    else:
        check_group_plans(region, q, plan, options.head_axes)
        results = by_head_groups(attend, (q, k, v, sinks), plan)
    wanted = (True, return_residual, return_max_logits)
    kept: list[Any] = [x for x, is_kept in zip(results, wanted, strict=True) if is_kept]
    return tuple(kept) if len(kept) > 1 else kept[0]


@dataclass(frozen=True)
class _Call:
    """What is static about a call."""

    region: Region
    specs: Specs
    stages: Stages

    @property
    def operand_specs(self):
        """Specs of q, k, v and sinks."""
        return self.specs.tensor, self.specs.keys, self.specs.keys, self.specs.sinks

    @property
    def result_specs(self):
        """Specs of out, lse and the kept remote keys and values."""
        return self.specs.tensor, self.specs.lse, self.specs.kept

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Axes that rows are split over and that are opened here; to combine over a manual one is the
        caller's, as for any operand.
        """
        return self.specs.batch + self.specs.rows


def _attend(call: _Call, operands, plan) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """``out``, ``lse`` and the largest logits of checked operands under one plan."""
    region, specs = call.region, call.specs
    plan = reshard(region, plan, specs.plan)
    operands = (*operands[:3], reshard(region, operands[3], specs.sinks))
    if region.is_local:
        axes = varying_axes((operands, plan)) | {region.axis_name}
        operands = make_varying(operands, axes)
    out, lse, max_logits = _attention(call, operands, plan)
    if max_logits is not None and region.is_local:
        # Here, where JAX tracks that all ranks then hold the same.
        max_logits = jax.lax.pmax(jax.lax.stop_gradient(max_logits), region.axis_name)
    return out, lse, max_logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call, operands, plan):
    out, lse, _, max_logits = _forward(call, operands, plan)
    return out, lse, max_logits


# Jitted, so that layers with equal shapes are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _forward(call, operands, plan):
    def forward(operands, plan):
        *results, max_logits = batch.forward(call.stages, operands, plan)
        if max_logits is not None and call.summed_axes:
            max_logits = jax.lax.pmax(max_logits, call.summed_axes)
        return *results, max_logits

    return run(
        call.region,
        forward,
        (operands, plan),
        in_specs=(call.operand_specs, call.specs.plan),
        out_specs=(*call.result_specs, call.specs.per_head),
    )


def _attention_forward(call, operands, plan):
    out, lse, kept, max_logits = _forward(call, operands, plan)
    # A remat policy that saves these needs no second forward pass.
    out, lse, max_logits = checkpoint_name((out, lse, max_logits), CONTEXT_NAME)
    kept = checkpoint_name(kept, REMOTE_KV_NAME)
    return (out, lse, max_logits), (operands, plan, (out, lse, kept))


@functools.partial(jax.jit, static_argnums=0)
def _backward(call, cotangents, results, operands, plan):
    def backward(cotangents, results, operands, plan):
        *gradients, dsinks = batch.backward(call.stages, cotangents, results, operands, plan)
        if dsinks is not None and call.summed_axes:
            dsinks = jax.lax.psum(dsinks, call.summed_axes)
        return *gradients, dsinks

    return run(
        call.region,
        backward,
        (cotangents, results, operands, plan),
        in_specs=(call.result_specs[:2], call.result_specs, call.operand_specs, call.specs.plan),
        out_specs=call.operand_specs,
    )


def _attention_backward(call, residuals, cotangents):
    operands, plan, results = residuals
    return _backward(call, cotangents[:2], results, operands, plan), None


_attention.defvjp(_attention_forward, _attention_backward)
