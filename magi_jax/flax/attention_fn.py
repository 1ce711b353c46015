"""Adapters from a plan or a mask to the ``attention_fn`` that Flax's attention modules call."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import jax

from magi_jax.masks.attn_mask import MASKS_COME_FROM, AttnMask
from magi_jax.ops import flex_flash_attention
from magi_jax.parallel import dist_attention
from magi_jax.parallel.operands import check_plan
from magi_jax.plan import AttentionPlan, SliceTable


def attention_fn(
    plan: AttentionPlan | AttnMask | SliceTable,
    *,
    axis_name: str = "cp",
    mesh: jax.sharding.Mesh | None = None,
    **arguments: Any,
) -> Callable[..., jax.Array]:
    """Makes the ``attention_fn`` of `nnx.MultiHeadAttention` or linen's
    `MultiHeadDotProductAttention`.

    The mask is the plan's. Whatever else Flax can ask for (a dense mask or bias, dropout,
    ``is_causal``) is refused when it is asked for; ``precision`` is accepted and unused, since the
    kernels always accumulate in float32.

    A plan that is an argument of the jitted step belongs to that trace: make the function inside
    the step, ``nnx.MultiHeadAttention.set_attributes(attention_fn=...)`` on a merged copy, or build
    linen's module with it. The blocks of `magi_jax.flax` take the function as a call argument and need
    neither.

    Args:
        plan: plan of the dispatched sequence; or for sequences on one device a mask, or the slice
            table of one, which may be an argument of the jitted step. A mask of ``T`` queries is that of
            every sequence; one of ``B * T`` is that of the batch as a single packed stream, as
            `masks.concatenate` of a mask for each sequence makes it.
        axis_name: mesh axis that the sequence is sharded over.
        mesh: mesh, where it is not in the context.
        **arguments: passed on to `dist_attention`, or to `flex_flash_attention` for a mask:
            ``scale``, ``logits_soft_cap`` and so on; with a plan ``options``, such as
            ``DistOptions(batch_axes="dp")`` where the batch is sharded over an automatic axis.

    Returns:
        A function ``(query [*B, T, N, H], key [*B, T, K, H], value [*B, T, K, Hv], ...) -> [*B, T,
        N, Hv]``, with at most one axis in front under a plan. It takes ``sinks [N]`` too, which are
        parameters of a layer and so come with the call.

    Raises:
        TypeError: ``plan`` is none of these, or an argument is none of the function that it is passed on to.
    """
    if isinstance(plan, (AttnMask, SliceTable)):
        _check_arguments(flex_flash_attention, arguments)
    elif isinstance(plan, (AttentionPlan, list, tuple)):
        _check_arguments(dist_attention, arguments)
        check_plan(plan)
    else:
        raise TypeError(
            "plan must be an AttentionPlan, an AttnMask or a SliceTable, got"
            f" {type(plan).__name__}; {MASKS_COME_FROM}"
        )

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, **more: Any) -> jax.Array:
        given = arguments | more
        if isinstance(plan, (AttnMask, SliceTable)):
            out = flex_flash_attention(query, key, value, plan, return_residual=False, **given)
        else:
            out = dist_attention(query, key, value, plan, axis_name, mesh=mesh, **given)
        return cast(jax.Array, out)

    # The names are those that Flax passes by keyword; linen passes only those that it finds here.
    def attention(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        del dropout_rng, broadcast_dropout, precision
        _refuse("bias", bias is not None, "a dense bias would need T x S memory")
        _refuse("mask", mask is not None, "the mask is the plan's; give it to make_plan")
        _refuse("is_causal=True", is_causal, "the mask is the plan's; give make_plan a causal mask")
        _refuse(
            f"dropout_rate={dropout_rate}",
            dropout_rate > 0.0 and not deterministic,
            "attention weights are never stored, so there is nothing to drop; use 0",
        )
        _refuse("sow_weights", module is not None, "attention weights are never stored")
        einsum = qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None
        _refuse("an einsum of the caller", einsum, "the kernels do the products themselves")
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        return attend(query, key, value, **({} if sinks is None else {"sinks": sinks}))

    return attention


def _check_arguments(passed_to: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Refuses at once what would be refused when Flax calls."""
    if unknown := arguments.keys() - inspect.signature(passed_to).parameters.keys():
        hint = "; how and where it runs is options=DistOptions(...)"
        raise TypeError(
            f"attention_fn passes its arguments on to {passed_to.__name__}, which takes no"
            f" {', '.join(sorted(unknown))}{hint if passed_to is dist_attention else ''}"
        )


def _refuse(what: str, asked: bool, why: str) -> None:
    if asked:
        raise NotImplementedError(f"magi_jax.flax.attention_fn does not take {what}: {why}")
