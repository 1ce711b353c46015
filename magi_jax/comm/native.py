"""The native transport: custom calls in which ranks read each other's rows where they lie.

A rank reads the operands of its peers over the link between the GPUs and writes its own results: no block
per peer and no padding on the wire. Where a cast has many blocks senders write to the receivers' results
instead. Results are those of the portable transport bit for bit; sums are added in the same order. See
docs/collectives.md.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.comm.transport import InFlight, Leaves, Part, Transport, sum_dtype
from magi_jax.mesh import result_type, unify_varying
from magi_jax.ops import ffi
from magi_jax.plan import CommMeta

CAST = "magi_jax_group_cast"
REDUCE_SUM = "magi_jax_group_reduce_sum"
REDUCE_LSE = "magi_jax_group_reduce_lse"
FINISH = "magi_jax_group_finish"
KEEP = "magi_jax_group_keep"

MAX_LEAVES = 8  # of one call; kMaxLeaves in xla_ffi/comm/params.h
# What a call runs beside, as xla_ffi/handlers/group_cuda.cc has it: nothing; attention, which must not take
# the SMs that it needs; short computation, after which attention waits for it.
ALONE, BESIDE, EXPOSED = 0, 1, 2
_SUMMED = ("float32", "float16", "bfloat16", "int32", "uint32", "bool")
_SEEN_BITS = 32  # peers in a word of a reduce's map


class _Call(NamedTuple):
    target: str
    comm: CommMeta
    axis_name: str
    beside: int  # what the call runs beside, one of the numbers above


@dataclass(frozen=True)
class NativeCalls:
    """The functions of a `Transport` over one symmetric memory.

    Attributes:
        cast_pool, reduce_pool: numbers of the two halves of the memory. Casts and reduces have one
            each, so that they run beside each other.
        axis_name: mesh axis that it was set up for.
        cp_size: ranks of that axis.
    """

    cast_pool: int
    reduce_pool: int
    axis_name: str
    cp_size: int

    def transport(self) -> Transport:
        """The transport that these functions make."""
        return Transport(
            "native",
            self.cast,
            self.reduce_sum,
            self.reduce_lse,
            self.start_cast,
            self.start_reduce_sum,
            self.finish_call,
            self.keep,
        )

    def cast(self, leaves: Leaves, comm: CommMeta, axis_name: str) -> list[jax.Array]:
        """See `Transport.cast`."""
        return self.finish_call(self._start_cast(leaves, _Call(CAST, comm, axis_name, ALONE)))

    def reduce_sum(
        self, leaves: Leaves, comm: CommMeta, axis_name: str, wire_dtype: Any
    ) -> list[jax.Array]:
        """See `Transport.reduce_sum`. Rows that stay are rounded to ``wire_dtype`` as well."""
        started = self._start_reduce(leaves, _Call(REDUCE_SUM, comm, axis_name, ALONE), wire_dtype)
        sums = self.finish_call(started)
        return [x.astype(sum_dtype(y.dtype)) for x, y in zip(sums, leaves, strict=True)]

    def reduce_lse(
        self, out: jax.Array, lse: jax.Array, comm: CommMeta, axis_name: str, wire_dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """See `Transport.reduce_lse`."""
        wire = out.astype(wire_dtype or out.dtype)
        _check_summed(wire.dtype)
        call = _Call(REDUCE_LSE, comm, axis_name, ALONE)
        part = self._start(call, [wire, lse.astype(jnp.float32)], [jnp.float32] * 2)
        merged = self.finish_call(InFlight((), (part,)))
        return merged[0].astype(sum_dtype(out.dtype)), merged[1].astype(sum_dtype(out.dtype))

    def start_cast(
        self, leaves: Leaves, comm: CommMeta, axis_name: str, exposed: bool = False
    ) -> InFlight:
        """See `Transport.start_cast`."""
        beside = EXPOSED if exposed else BESIDE
        return self._start_cast(leaves, _Call(CAST, comm, axis_name, beside))

    def _start_cast(self, leaves: Leaves, call: _Call) -> InFlight:
        parts = [
            self._start(call, leaves[some], [leaf.dtype for leaf in leaves[some]])
            for some in _in_calls(leaves, lambda leaf: None)
        ]
        return InFlight((), tuple(parts))

    def start_reduce_sum(
        self,
        leaves: Leaves,
        comm: CommMeta,
        axis_name: str,
        wire_dtype: Any,
        onto: Leaves | None = None,
    ) -> InFlight:
        """See `Transport.start_reduce_sum`."""
        call = _Call(REDUCE_SUM, comm, axis_name, BESIDE)
        return self._start_reduce(leaves, call, wire_dtype, onto)

    def _start_reduce(
        self, leaves: Leaves, call: _Call, wire_dtype: Any, onto: Leaves | None = None
    ) -> InFlight:
        wire = [leaf.astype(wire_dtype or leaf.dtype) for leaf in leaves]
        for leaf in wire:
            _check_summed(leaf.dtype)
        parts = [
            self._start(
                call,
                wire[some],
                [sum_dtype(leaf.dtype) for leaf in wire[some]],
                () if onto is None else onto[some],
            )
            for some in _in_calls(wire, lambda leaf: leaf.dtype)
        ]
        return InFlight((), tuple(parts))

    def finish_call(self, in_flight: InFlight) -> list[jax.Array]:
        """See `Transport.finish_call`."""
        results: list[jax.Array] = []
        for part in in_flight.parts:
            operands = (part.map, *part.results, *part.held)
            places = range(1, 1 + len(part.results))
            results += _give_back(FINISH, operands, places, pool=np.int32(part.pool))
        return results

    def keep(self, leaves: Leaves) -> list[jax.Array]:
        """See `Transport.keep`."""
        return _give_back(KEEP, leaves, range(len(leaves)))

    def _start(self, call: _Call, leaves: Leaves, dtypes: list, onto: Leaves = ()) -> Part:
        self._check_place(call.axis_name)
        spec, is_cast = call.comm.spec, call.target == CAST
        rows = spec.dst_rows if is_cast else spec.src_rows
        slots = 2 if is_cast else spec.cp_size + -(-spec.cp_size // _SEEN_BITS)
        rank = jax.lax.axis_index(call.axis_name)
        operands = unify_varying(call.comm.send, call.comm.recv, rank, *leaves, *onto)
        shapes = [(slots, rows), *((rows, *leaf.shape[1:]) for leaf in leaves)]
        types = tuple(
            result_type(shape, dtype, operands[0])
            for shape, dtype in zip(shapes, [jnp.int32, *dtypes], strict=True)
        )
        pool = self.cast_pool if is_cast else self.reduce_pool
        attributes = {
            "pool": pool,
            "cp_size": spec.cp_size,
            "src_rows": spec.src_rows,
            "dst_rows": spec.dst_rows,
            "self_rows": spec.self_rows,
            "beside": call.beside,
        }
        # No way under vmap: a loop over starts would copy results that are not there yet.
        held = operands[: len(operands) - len(onto)]  # the others become results
        aliases = {len(held) + i: 1 + i for i in range(len(onto))}
        start = jax.ffi.ffi_call(ffi.target(call.target), types, input_output_aliases=aliases)
        row_map, *results = start(*operands, **{k: np.int32(v) for k, v in attributes.items()})
        return Part(row_map, tuple(results), held, pool)

    def _check_place(self, axis_name):
        if axis_name != self.axis_name:
            raise ValueError(
                f"symmetric memory {self.cast_pool} was set up for axis {self.axis_name!r}, the call is"
                f" over {axis_name!r}"
            )
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.shape[axis_name] != self.cp_size:
            raise ValueError(
                f"symmetric memory {self.cast_pool} was set up for {self.cp_size} ranks, axis"
                f" {axis_name!r} has {mesh.shape[axis_name]}"
            )
        others = [name for name in mesh.axis_names if name not in mesh.manual_axes]
        if others:
            raise ValueError(
                f"native group collectives run where every mesh axis is manual, {others} are not:"
                " XLA would gather what is sharded over them; make the shard_map manual over them"
                " too"
            )


def _in_calls(leaves: Leaves, kind: Callable) -> Iterator[slice]:
    """Leaves in order, as many together as a call takes; those of one call are of one kind."""
    first = 0
    for _, alike in itertools.groupby(leaves, kind):
        end = first + len(list(alike))
        while first < end:
            some = slice(first, min(first + MAX_LEAVES, end))
            yield some
            first = some.stop


def _check_summed(dtype: Any) -> None:
    if jnp.dtype(dtype).name not in _SUMMED:
        raise NotImplementedError(
            f"the native group_reduce adds {', '.join(_SUMMED)}; got {jnp.dtype(dtype).name}"
        )


def _give_back(
    target: str, operands: Leaves, places: range, **attributes: np.int32
) -> list[jax.Array]:
    """Calls what returns the operands at ``places``, in the same buffers."""
    operands = unify_varying(*operands)
    types = [result_type(operands[i].shape, operands[i].dtype, operands[0]) for i in places]
    aliases = {place: i for i, place in enumerate(places)}
    call = jax.ffi.ffi_call(ffi.target(target), types, input_output_aliases=aliases)
    return list(call(*operands, **attributes))
