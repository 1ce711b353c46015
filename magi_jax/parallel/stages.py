"""Distributed attention on one rank: stages of the forward and the backward pass.

Everything here runs where all mesh axes are manual, on local arrays ``q [T, N, H]``, ``k [S, K,
H]``, ``v [S, K, Hv]`` and the rank's own part of a plan. Nothing here has a derivative: the two
passes are each other's, and `dist_attention` says so.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from magi_jax.comm import InFlight, Transport, finish, start_cast, start_reduce
from magi_jax.ops import Implementation, add_sinks, sinks_gradient
from magi_jax.ops.lse import max_of_rows
from magi_jax.parallel.late import Late
from magi_jax.parallel.overlap import after, barrier, behind
from magi_jax.parallel.travelling import Travel, merge_returned
from magi_jax.plan import AttentionPlan, CommMeta, LateTables

KeysValues = tuple[jax.Array, jax.Array]
Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]  # q, k, v, sinks


@dataclass(frozen=True)
class Stages:
    """How stages are computed and fed. Hashable.

    Attributes:
        implementation: attention on one device.
        axis_name: axis whose ranks exchange keys and values.
        scale: factor of the logits.
        logits_soft_cap: cap of the logits, 0 = none.
        transport: transport of the group collectives.
        reduce_dtype: dtype in which partial results travel; sums are made in float32.
        keep_remote_kv: whether the backward pass gets the forward pass's remote keys and values.
        with_max_logits: whether the forward pass gives the largest logits.
        shared_key_axes: axes over which all ranks hold the same keys, whose gradients are summed.
    """

    implementation: Implementation
    axis_name: str
    scale: float
    logits_soft_cap: float
    transport: Transport
    reduce_dtype: Any
    keep_remote_kv: bool
    with_max_logits: bool = False
    shared_key_axes: tuple[str, ...] = ()

    def forward(
        self, operands: Operands, plan: AttentionPlan
    ) -> tuple[jax.Array, jax.Array, tuple[KeysValues, ...], jax.Array | None]:
        """Returns ``out [T, N, Hv]`` in the dtype of q, ``lse [T, N]`` float32, the remote keys and
        values of each stage, and those of late queries, if they are kept, and the largest logits ``[N]``
        of this rank's rows if they are asked for.
        """
        q, k, v, sinks = operands
        options = self._kernel_options() | {"with_row_max": self.with_max_logits}
        attend = self.implementation.forward
        remote = _Prefetch(self, (k, v), plan.comm)
        late = self._late(plan.late)
        of_late_keys = late.fetch((k, v)) if late else None
        travel, returned = self._travel(plan), None
        others: list[jax.Array] = []  # largest logits of visitors and of late queries
        visitors = travel.send((q,)) if travel else ()
        table = behind(remote.behind_start(plan.calc[0]), of_late_keys)
        # Nothing is merged into what is the only result.
        is_final = not plan.comm and travel is None and sinks is None
        out_dtype = q.dtype if is_final else jnp.float32
        out, lse, *row_max = attend(q, k, v, table, out_dtype=out_dtype, **options)
        if travel:
            visitors, (out, lse) = barrier(visitors, (out, lse))
            attend_visitors = functools.partial(attend, **options)
            returned, others = travel.attend(attend_visitors, visitors, (k, v))
        kept = []
        for stage, table in enumerate(plan.calc[1:]):
            keys_values, merged = remote.take(stage, (out, lse))
            table = remote.behind_start(table)
            kept.append(keys_values)
            out, lse, *more = attend(q, *keys_values, table, accumulate=merged, **options)
            row_max = list(map(jnp.maximum, row_max, more))
        if late:
            keys_values, merged = late.take(of_late_keys, (out, lse))
            kept.append(keys_values)
            attend_late = functools.partial(attend, **options)
            (out, lse), more = late.attend(attend_late, q, keys_values, merged)
            others = [*others, *more]
        out, lse = merge_returned((out, lse), returned)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        max_logits = max_of_rows(jnp.concatenate([*row_max, *others])) if row_max else None
        return out.astype(q.dtype), lse, tuple(kept) if self.keep_remote_kv else (), max_logits

    def backward(
        self,
        cotangents: tuple[jax.Array, jax.Array],
        results: tuple[jax.Array, jax.Array, tuple[KeysValues, ...]],
        operands: Operands,
        plan: AttentionPlan,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Gradients of q, k, v and sinks in their dtypes; that of sinks over this rank's rows only.

        Args:
            cotangents: of ``out`` and ``lse``.
            results: the first three of what `forward` returned.
            operands: ``q, k, v, sinks``.
            plan: the rank's part of the plan.
        """
        (dout, dlse), (out, lse, kept), (q, k, v, sinks) = cotangents, results, operands

        def gradients(rows, keys_values, table, dkv_dtype=jnp.float32):
            (dout, q, lse, delta), (k, v) = rows, keys_values
            options = self._kernel_options() | {"dkv_dtype": dkv_dtype}
            return self.implementation.backward(dout, q, k, v, lse, delta, table, **options)

        # What was kept came in the stages of the forward pass.
        stages = plan.forward_stages if self.keep_remote_kv else plan.backward_stages
        # Tied to the cotangents: it must not start before, nor be merged with the forward pass's
        # transfer, whose result would then be kept alive in between.
        remote = _Prefetch(self, (k, v), after(stages.comm, dout), kept[: len(stages.comm)])
        late = self._late(after(stages.late, dout), *kept[len(stages.comm) :])
        of_late_keys = late.fetch((k, v)) if late else None
        dout = behind(remote.behind_start(dout), of_late_keys)
        delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
        rows = (dout, q, lse, delta)
        travel, returned_dq = self._travel(plan), None
        visitors = travel.send(rows) if travel else ()
        # Own keys come last: their gradients stay, and hide the way back of the last stage's.
        remote_dq, dkv, returning = self._remote_gradients(gradients, rows, remote, stages)
        of_late = None
        if late:
            late_dq, of_late = late.differentiate(gradients, rows, of_late_keys)
        table = behind(behind(stages.calc[0], returning), of_late)
        # Nothing is added to what is all of a key's gradient.
        is_final = late is None or late.is_all_of_its_keys
        is_final &= not stages.comm and travel is None and not self.shared_key_axes
        dkv_dtype = k.dtype if is_final else jnp.float32
        dq, *own_dkv = gradients(rows, (k, v), table, dkv_dtype)
        if travel:
            visitors, (dq, *own_dkv) = barrier(visitors, (dq, *own_dkv))
            returned_dq, visitors_dkv = travel.differentiate(gradients, visitors, (k, v))
            own_dkv = list(map(jnp.add, own_dkv, visitors_dkv))
        if returning is not None:
            returning, dq = barrier(returning, dq)
            dkv = _add(dkv, finish(returning, self.transport))
        dq = dq if remote_dq is None else remote_dq + dq
        if returned_dq is not None:
            dq = dq + returned_dq
        dkv = _add(dkv, own_dkv)
        if late:
            of_late, dq = barrier(of_late, dq)
            dq, dkv = late.add_gradient(dq, late_dq), late.add_returned(dkv, of_late)
        dk, dv = self._sum_shared(dkv)
        dsinks = None if sinks is None else sinks_gradient(sinks, lse, delta).astype(sinks.dtype)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks

    def _remote_gradients(self, gradients, rows, remote: "_Prefetch", stages):
        """Of all remote stages: dQ, what has come back of dK and dV, and what is still on its way;
        each None where there is none.
        """
        (*others, delta), dq, dkv, returning = rows, None, None, None
        for stage, table in enumerate(stages.calc[1:]):
            keys_values, (delta, dq) = remote.take(stage, (delta, dq))
            table = behind(remote.behind_start(table), returning)
            stage_dq, *stage_dkv = gradients((*others, delta), keys_values, table)
            dq = stage_dq if dq is None else dq + stage_dq
            if returning is not None:
                # Those of the stage before had this one to hide behind.
                returning, dq = barrier(returning, dq)
                dkv = _add(dkv, finish(returning, self.transport))
            returning = self._send_back(stage_dkv, stages.comm[stage])
        return dq, dkv, returning

    def _travel(self, plan: AttentionPlan) -> Travel | None:
        if plan.travel is None:
            return None
        return Travel(plan.travel, self.axis_name, self.transport, self.reduce_dtype)

    def _late(self, tables: LateTables | None, kept: KeysValues | None = None) -> Late | None:
        if tables is None:
            return None
        return Late(tables, self.axis_name, self.transport, self.reduce_dtype, kept)

    def _kernel_options(self) -> dict[str, Any]:
        return {"scale": self.scale, "logits_soft_cap": self.logits_soft_cap}

    def fetch(self, keys_values: KeysValues, comm: CommMeta) -> InFlight:
        """Starts to fetch keys and values of other ranks, ``[dst_rows, K, H]`` and ``[..., Hv]``."""
        return start_cast(keys_values, comm, self.axis_name, transport=self.transport)

    def _sum_shared(self, dkv):
        if not self.shared_key_axes:
            return dkv
        wire = [x.astype(self.reduce_dtype or x.dtype) for x in dkv]
        return jax.lax.psum(wire, self.shared_key_axes)

    def _send_back(self, partials: list[jax.Array], comm: CommMeta) -> InFlight:
        return start_reduce(
            partials,
            comm,
            self.axis_name,
            wire_dtype=self.reduce_dtype,
            transport=self.transport,
        )


class _Prefetch:
    """Fetches the keys and values of remote stages, each one stage ahead of its use."""

    def __init__(self, stages: Stages, keys_values: KeysValues, comm: tuple, kept: tuple = ()):
        self.stages, self.keys_values, self.comm, self.kept = stages, keys_values, comm, kept
        self.pending = stages.fetch(keys_values, comm[0]) if comm and not kept else None

    def take(self, stage: int, done: tuple) -> tuple[KeysValues, tuple]:
        """Keys and values of a stage, and ``done``, results so far, which they wait for."""
        if self.kept:
            return self.kept[stage], done
        pending, done = barrier(self.pending, done)
        self.pending = None
        keys, values = finish(pending, self.stages.transport)
        if stage + 1 < len(self.comm):
            comm = after(self.comm[stage + 1], done)
            self.pending = self.stages.fetch(self.keys_values, comm)
        return (keys, values), done

    def behind_start(self, operand: Any) -> Any:
        """An operand of the computation that the fetch in flight is to hide behind."""
        return behind(operand, self.pending)


def _add(total: list[jax.Array] | None, more: list[jax.Array]) -> list[jax.Array]:
    return more if total is None else list(map(jnp.add, total, more))
