"""Checks of the operands of distributed attention, and how they are sharded."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from magi_jax.ops.checks import heads_first
from magi_jax.parallel.region import AxisNames, Region, as_tuple, check_axes, explicit_entries
from magi_jax.parallel.stages import Operands
from magi_jax.plan import AttentionPlan
from magi_jax.plan.spec import OTHER_KEYS, REPLICATED_KEYS


@dataclass(frozen=True)
class Specs:
    """Shardings over the open axes of a region; what `run` is given. Hashable.

    Attributes:
        batch: axes of the batch, empty without a batch or where they are manual already.
        rows: the context-parallel axis, empty where it is manual already.
        heads: axes of the heads.
        batched: whether arrays have a batch axis.
        stacked: whether the plan has a replica for each sequence of the batch.
        sinks_rank: dimensions of the sinks.
        keys_replicated: whether every rank has all keys and values.
    """

    batch: tuple[str, ...]
    rows: tuple[str, ...]
    heads: tuple[str, ...]
    batched: bool
    stacked: bool
    sinks_rank: int
    keys_replicated: bool

    @property
    def lse(self) -> P:
        """``[B, T, N]`` or ``[T, N]``."""
        return P(*self._batch(self.batched), self.rows, self.heads)

    @property
    def tensor(self) -> P:
        """``[B, T, N, H]`` or ``[T, N, H]``."""
        return P(*self.lse, None)

    @property
    def keys(self) -> P:
        """``[B, S, K, H]`` or ``[S, K, H]``."""
        rows = () if self.keys_replicated else self.rows
        return P(*self._batch(self.batched), rows, self.heads, None)

    @property
    def per_head(self) -> P:
        """``[N]``."""
        return P(self.heads)

    @property
    def plan(self) -> P:
        """Every leaf of the plan."""
        return P(*self._batch(self.stacked), self.rows)

    @property
    def sinks(self) -> P:
        """``[N]`` or ``[X, N]``."""
        return P(*[None] * (self.sinks_rank - 1), self.heads)

    @property
    def kept(self) -> P:
        """Remote keys and values: sequences that share a plan are folded into heads."""
        if self.stacked:
            return P(self.batch, self.rows, self.heads, None)
        return P(self.rows, self.batch + self.heads, None)

    def _batch(self, present):
        return (self.batch,) if present else ()


def find_specs(
    region: Region,
    operands: Operands,
    plan: AttentionPlan,
    batch_axes: AxisNames,
    head_axes: AxisNames,
) -> Specs:
    """Shardings of the operands: from types where axes are explicit, else from the arguments."""
    q, k, v, sinks = operands
    batched = q.ndim == 4
    for name, axes in (("batch_axes", as_tuple(batch_axes)), ("head_axes", as_tuple(head_axes))):
        check_axes(region, axes, name)
    if as_tuple(batch_axes) and not batched:
        raise ValueError(f"batch_axes={batch_axes!r}, but q has no batch axis: shape {q.shape}")
    _refuse_unnamed_axes(region, batch_axes, head_axes)
    replicated = plan.spec.keys == REPLICATED_KEYS
    batch, heads = _explicit_specs(region, q, k, v, batched, replicated)
    automatic = region.automatic_axes
    batch += tuple(axis for axis in as_tuple(batch_axes) if axis in automatic)
    heads += tuple(axis for axis in as_tuple(head_axes) if axis in automatic)
    rows = () if region.is_local else (region.axis_name,)
    stacked, sinks_rank = plan.positions.ndim == 3, 0 if sinks is None else sinks.ndim
    return Specs(batch, rows, heads, batched, stacked, sinks_rank, replicated)


def _refuse_unnamed_axes(region, batch_axes, head_axes):
    """An automatic axis that nobody mentions would have its shards gathered without a word."""
    unnamed = [
        axis
        for axis in region.automatic_axes
        if axis != region.axis_name and region.sizes[axis] > 1
    ]
    if unnamed and batch_axes is None and head_axes is None:
        raise ValueError(
            f"the sharding of q over the automatic mesh axes {unnamed} is not known here: name them"
            " in DistOptions(batch_axes=, head_axes=), or say batch_axes=() if q is replicated over them"
        )


def _explicit_specs(region, q, k, v, batched, keys_replicated):
    """Axes of batch, rows and heads in the types of q, k and v, which must agree."""
    q_entries, k_entries, v_entries = (explicit_entries(region, x) for x in (q, k, v))
    if keys_replicated:
        _check_replicated(k, v, k_entries, v_entries)
        k_entries[-3] = v_entries[-3] = q_entries[-3]
    if not q_entries == k_entries == v_entries:
        shardings = ", ".join(f"{n}: {jax.typeof(x)}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"q, k and v must be sharded alike; got {shardings}")
    batch = q_entries[0] if batched else ()
    rows, heads, dims = q_entries[-3:]
    wanted = (region.axis_name,) if region.axis_name in region.explicit_axes else ()
    if rows != wanted or dims:
        spec = f"P({'None, ' if batched else ''}{region.axis_name!r})"
        layout = "[B, T, N, H]" if batched else "[T, N, H]"
        raise ValueError(
            f"the rows of q must be sharded over {region.axis_name!r} alone and its head dim over"
            f" nothing; q is {layout}, got {jax.typeof(q)}. Bring it there with jax.device_put(q,"
            f" NamedSharding(mesh, {spec})), or inside of jit with jax.sharding.reshard(q, {spec})"
        )
    return batch, heads


def _check_replicated(k, v, k_entries, v_entries):
    if k_entries[-3] or v_entries[-3]:
        raise ValueError(
            "the plan is for keys that every rank holds, but the rows of k or v are sharded; got k:"
            f" {jax.typeof(k)}, v: {jax.typeof(v)}"
        )


def check_operands(region: Region, specs: Specs, operands: Operands, plan: AttentionPlan) -> None:
    """Refuses operands that do not fit the plan or the mesh; shapes are as the caller sees them."""
    q, k, v, sinks = operands
    if plan.cp_size != region.cp_size:
        raise ValueError(
            f"the plan is for {plan.cp_size} ranks, but mesh axis {region.axis_name!r} has"
            f" {region.cp_size}"
        )
    key_rows, key_plan = plan.spec.calc[0].k_len, "plan"
    if plan.spec.keys == OTHER_KEYS:
        key_plan = "plan_of_the_keys"
    _check_rows(region, "q", q, plan.spec.local_len, "plan")
    for name, x in (("k", k), ("v", v)):
        if specs.keys_replicated:
            if x.shape[-3] != key_rows:
                raise ValueError(
                    f"{name} has {x.shape[-3]} rows, but the plan is for {key_rows} keys on every rank"
                )
        else:
            _check_rows(region, name, x, key_rows, key_plan)
    _check_heads(region, specs, q, k)
    if specs.batched:
        _check_batch(region, specs, q, plan)
    elif specs.stacked:
        raise ValueError(
            f"a stacked plan has one replica per sequence of a batch, but q is {q.shape}: no batch"
        )
    if sinks is not None and (sinks.ndim not in (1, 2) or sinks.shape[-1] != q.shape[-2]):
        raise ValueError(f"sinks must be [N] or [X, N] with N = {q.shape[-2]}, got {sinks.shape}")
    if sinks is not None and not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"sinks must be floating, got {sinks.dtype}")


def _check_rows(region, name, x, local_len, plan_name):
    ranks = 1 if region.is_local else region.cp_size
    rows = local_len * ranks
    if x.shape[-3] != rows:
        axis = ", axis=1" if x.ndim == 4 else ""
        instead = (
            heads_first((x.shape,), (rows,))
            or f"; bring tokens there with dispatch(x, {plan_name}, {region.axis_name!r}{axis})"
        )
        raise ValueError(
            f"{name} has {x.shape[-3]} rows, but the plan lays {rows} out"
            f" ({local_len} per rank{'' if region.is_local else f', {ranks} ranks'}){instead}"
        )


def check_plan(plan: object) -> None:
    """Refuses what is neither a plan nor several."""
    several = isinstance(plan, (list, tuple)) and bool(plan)
    for each in plan if several else (plan,):  # type: ignore[attr-defined]
        if not isinstance(each, AttentionPlan):
            raise TypeError(
                "plan must be an AttentionPlan (make_plan(mask, cp_size) makes one) or a sequence of them,"
                f" got {type(each).__name__}"
            )


def check_group_plans(
    region: Region, q: jax.Array, plans: Sequence[AttentionPlan], head_axes: AxisNames
) -> None:
    """Refuses plans that cannot serve groups of heads of the same tokens."""
    for i, plan in enumerate(plans):
        sizes = [(p.spec.cp_size, p.spec.seq_len, p.spec.local_len) for p in (plan, plans[0])]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"plan {i} is for (ranks, tokens, rows of each rank) {sizes[0]}, plan 0 for {sizes[1]};"
                " groups of heads share one dispatch: make the others with plan.with_mask(mask)"
            )
    named = tuple(axis for axis in as_tuple(head_axes) if axis in region.automatic_axes)
    sharded = named + explicit_entries(region, q)[-2]
    if sharded:
        raise NotImplementedError(
            f"heads are sharded over {sharded}, and a plan for each group of heads needs all of them"
            " in one place: call dist_attention inside a shard_map that is manual over that axis, with"
            " the plans of its own heads on each shard"
        )


def check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Refuses operands that are no attention, whatever the plan."""
    shapes = f"got {q.shape=} {k.shape=} {v.shape=}"
    if q.ndim not in (3, 4) or k.ndim != q.ndim or v.ndim != q.ndim:
        raise ValueError(f"q, k and v must all be [T, N, H] or all be [B, T, N, H]; {shapes}")
    same = (
        k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1] and q.shape[:-3] == k.shape[:-3]
    )
    if not same:
        raise ValueError(f"expected q [*B, T, N, H], k [*B, S, K, H], v [*B, S, K, Hv]; {shapes}")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"q has {q.shape[-2]} heads, which is not a multiple of the {k.shape[-2]} of k;"
            f" {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )


def _check_heads(region, specs, q, k):
    shards = _product(region, specs.heads)
    if k.shape[-2] % shards:
        raise ValueError(
            f"k has {k.shape[-2]} heads (q has {q.shape[-2]}), which the {shards} shards of mesh axes"
            f" {specs.heads} do not divide; where kv heads are fewer, repeat them first"
        )


def _check_batch(region, specs, q, plan):
    shards = _product(region, specs.batch)
    if q.shape[0] % shards:
        raise ValueError(
            f"the batch of {q.shape[0]} does not divide over the {shards} shards of mesh axes"
            f" {specs.batch}"
        )
    if specs.stacked and plan.positions.shape[0] != q.shape[0]:
        raise ValueError(
            f"the stacked plan has {plan.positions.shape[0]} replicas here, the batch {q.shape[0]}"
            " sequences"
        )


def _product(region, axes):
    size = 1
    for axis in axes:
        size *= region.sizes[axis]
    return size
