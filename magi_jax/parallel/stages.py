"""Distributed attention on one rank: stages of the forward and the backward pass.

Everything here runs where all mesh axes are manual, on local arrays ``q [T, N, H]``, ``k [S, K,
H]``, ``v [S, K, Hv]`` and the rank's own part of a plan. Nothing here has a derivative: the two
passes are each other's, and `dist_attention` says so.
"""

import functools
import zlib
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from magi_jax.comm import Transport
from magi_jax.ops import BackwardOperands, Implementation, add_sinks, sinks_gradient
from magi_jax.ops.lse import max_of_rows
from magi_jax.parallel.late import Late
from magi_jax.parallel.overlap import after, barrier, behind
from magi_jax.parallel.pipeline import Fetches, KeysValues, Link, Returns
from magi_jax.parallel.travelling import Travel, merge_returned
from magi_jax.plan import AttentionPlan, LateTables

Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]  # q, k, v, sinks
# What the text of a `Stages` may not hold: names of functions have addresses, which differ between processes.
_NO_TEXT = ("implementation", "transport")


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
        comm, late_tables = plan.comm, plan.late
        # One of XLA's own collectives may serve two calls with equal keys; tied here too, the transfers of
        # both passes would be merged on CPUs, where barriers go early.
        if self.transport.start_cast is not None:
            comm, late_tables = self._of_one_call(
                (comm, late_tables), q, sinks, plan.calc, plan.travel
            )
        remote = Fetches(self._link, (k, v), comm)
        late = self._late(late_tables)
        of_late_keys = late.fetch((k, v)) if late else None
        travel, returned = self._travel(plan), None
        of_visitors: list[jax.Array] = []  # their largest logits
        visitors = travel.send((q,)) if travel else ()
        table = behind(remote.behind_start(plan.calc[0]), of_late_keys)
        # Nothing is merged into what is the only result; late queries merge with none of theirs.
        is_final = not comm and travel is None and sinks is None
        out_dtype = q.dtype if is_final else jnp.float32
        out, lse, *row_max = attend(q, k, v, table, out_dtype=out_dtype, **options)
        if travel:
            visitors, (out, lse) = barrier(visitors, (out, lse))
            attend_visitors = functools.partial(attend, **options)
            returned, of_visitors = travel.attend(attend_visitors, visitors, (k, v))
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
            row_max = list(map(jnp.maximum, row_max, more))
        out, lse = merge_returned((out, lse), returned)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        max_logits = max_of_rows(jnp.concatenate([*row_max, *of_visitors])) if row_max else None
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
        # What was kept came in the stages of the forward pass.
        stages = plan.forward_stages if self.keep_remote_kv else plan.backward_stages
        # Tied to the cotangents: it must not start before, nor be merged with the forward pass's
        # transfer, whose result would then be kept alive in between.
        tables = stages.comm, stages.late
        tied = cotangents, results[:2], operands, (stages.calc, stages.first), plan.travel
        comm, late_tables = self._of_one_call(tables, *tied)
        exposed = stages.first is None
        remote = Fetches(self._link, (k, v), comm, kept[: len(stages.comm)], exposed)
        late = self._late(late_tables, *kept[len(stages.comm) :])
        of_late_keys = late.fetch((k, v)) if late else None
        zeros = [jnp.zeros((), jnp.float32)] * 3
        dout, zeros = behind(remote.behind_start((dout, zeros)), of_late_keys)
        delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
        rows = (dout, q, lse, delta)
        travel = self._travel(plan)
        visitors = travel.send(rows) if travel else ()
        # Own keys come last: their gradients stay, and hide the way back of the last stage's. Some queries
        # may see them first, which hides the first fetch.
        dq, total = None, None
        if stages.first is not None:
            dq, *total = self._differentiate(rows, (k, v), remote.behind_start(stages.first))
        elif stages.comm:
            dq, total = self._nothing_yet(zeros, (q, k, v), remote)
        returns = Returns(self._link, total)
        dq = self._remote_gradients(rows, dq, remote, returns, stages)
        of_late = None
        if late:
            gradients = functools.partial(self._differentiate, dkv_dtype=self._wire_dtype(q, k))
            dq, of_late = late.differentiate(gradients, rows, of_late_keys, dq)
        table = behind(returns.behind_start(stages.calc[0]), of_late)
        # Nothing is added to what is all of a key's gradient.
        is_final = late is None or late.is_all_of_its_keys
        is_final &= not stages.comm and travel is None and not self.shared_key_axes
        dkv_dtype = k.dtype if is_final else jnp.float32
        dq, own_dkv, dq_of_travelled = self._own_gradients(
            rows, (k, v), table, dkv_dtype, dq, travel, visitors
        )
        dq = returns.collect(dq)
        if dq_of_travelled is not None:
            dq = dq + dq_of_travelled
        dkv = returns.plus(own_dkv)
        if late:
            of_late, dq = barrier(of_late, dq)
            dkv = late.add_returned(dkv, of_late)
        dk, dv = self._sum_shared(dkv)
        dsinks = None if sinks is None else sinks_gradient(sinks, lse, delta).astype(sinks.dtype)
        gradients_of = dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks
        # Without these nothing was in flight.
        return self._link.keep(gradients_of) if late or stages.comm else gradients_of

    def _differentiate(
        self, rows, keys_values, table, dkv_dtype=jnp.float32, dq=None, dq_dtype=jnp.float32
    ):
        """Adds to dQ what the keys of a table give; also their dK and dV. Rows are dout, q, lse and delta."""
        (dout, q, lse, delta), (k, v) = rows, keys_values
        options = {"dkv_dtype": dkv_dtype, "dq_dtype": dq_dtype, "accumulate": dq}
        options |= self._kernel_options()
        operands = BackwardOperands(dout, q, k, v, lse, delta)
        return self.implementation.backward(operands, table, **options)

    def _own_gradients(self, rows, keys_values, table, dkv_dtype, dq, travel, visitors):
        """Adds to dQ what own keys give; also their dK and dV, and dQ of queries that travelled."""
        dq_dtype = rows[1].dtype if dq is None and travel is None else jnp.float32
        dq, *dkv = self._differentiate(rows, keys_values, table, dkv_dtype, dq, dq_dtype)
        if not travel:
            return dq, dkv, None
        visitors, (dq, *dkv) = barrier(visitors, (dq, *dkv))
        returned_dq, of_visitors = travel.differentiate(self._differentiate, visitors, keys_values)
        return dq, list(map(jnp.add, dkv, of_visitors)), returned_dq

    def _nothing_yet(self, zeros, arrays, remote: Fetches):
        """Zeros for dQ, to which each call adds, and for sums that come back, to which each transfer does.

        They hide more of a first fetch that takes longer than the sum of ``dout * out``, as that of all keys
        of a stage does; later they would be written beside attention. ``zeros`` has one for each array, since
        XLA would copy what is aliased twice.
        """
        dq, *total = (jnp.broadcast_to(x, a.shape) for x, a in zip(zeros, arrays, strict=True))
        if remote.kept or self.transport.start_reduce_sum is None:
            return dq, None
        return after(dq, total), total

    def _remote_gradients(self, rows, dq, remote: Fetches, returns: Returns, stages):
        """Adds to dQ what all remote stages do; their dK and dV begin their way back."""
        *others, delta = rows
        order = range(len(stages.comm))
        # Where keys are there already, those of other nodes come first: their gradients have the longer way.
        for stage in reversed(order) if remote.kept else order:
            keys_values, (delta, dq) = remote.take(stage, (delta, dq))
            table = stages.calc[stage + 1]
            table = returns.behind_start(remote.behind_start(table))
            dkv_dtype = self._wire_dtype(rows[1], keys_values[0])
            dq, *stage_dkv = self._differentiate(
                (*others, delta), keys_values, table, dkv_dtype, dq
            )
            dq = returns.collect(dq)
            returns.give(stage_dkv, stages.comm[stage])
        returns.hasten()
        return dq

    def _wire_dtype(self, q: jax.Array, k: jax.Array) -> Any:
        """Dtype in which kernels write gradients that leave: that of the keys where they travel in it, but
        for grouped heads, whose kernels add up in float32 first.
        """
        is_written_once = q.shape[1] == k.shape[1]
        return k.dtype if self.reduce_dtype == k.dtype and is_written_once else jnp.float32

    def _travel(self, plan: AttentionPlan) -> Travel | None:
        if plan.travel is None:
            return None
        return Travel(plan.travel, self._link)

    def _of_one_call(self, tables: Any, *operands: Any) -> Any:
        """Tables of transfers that are there once ``operands`` are, which tell this call from others.

        Of two operations with equal operands XLA makes one. Two calls with equal keys would share a transfer
        that runs beside computation, and each would want to finish it.
        """
        if not jax.tree.leaves(tables):
            return tables
        static = [getattr(self, f.name) for f in fields(self) if f.name not in _NO_TEXT]
        mark = zlib.crc32(repr((self.implementation.name, static)).encode())
        return after(tables, operands, jnp.uint32(mark))

    @property
    def _link(self) -> Link:
        return Link(self.axis_name, self.transport, self.reduce_dtype)

    def _late(self, tables: LateTables | None, kept: KeysValues | None = None) -> Late | None:
        if tables is None:
            return None
        return Late(tables, self._link, kept)

    def _kernel_options(self) -> dict[str, Any]:
        return {"scale": self.scale, "logits_soft_cap": self.logits_soft_cap}

    def _sum_shared(self, dkv):
        if not self.shared_key_axes:
            return dkv
        wire = [x.astype(self.reduce_dtype or x.dtype) for x in dkv]
        return jax.lax.psum(wire, self.shared_key_axes)
