"""How much room calls need where operands are staged in symmetric memory."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from magi_jax.comm.native import MAX_LEAVES
from magi_jax.plan import AnyCommSpec, PlanSpec

_ALIGNMENT = 256  # of each array of a call; kStagingAlignment in xla_ffi/handlers/group_cuda.cc


def staging_bytes(
    specs: Iterable[AnyCommSpec], cast_row_bytes: int, reduce_row_bytes: int | None = None
) -> int:
    """Room that calls along ``specs`` need with ``placement="staged"``.

    Args:
        specs: sizes of the transfers.
        cast_row_bytes: bytes of a row of all arrays of one `group_cast` together.
        reduce_row_bytes: the same for `group_reduce`, in the dtype that travels; None takes those
            of the cast.
    """
    reduce_row_bytes = cast_row_bytes if reduce_row_bytes is None else reduce_row_bytes
    steps = [step for spec in specs for step in spec.steps]
    needs = [max(s.src_rows * cast_row_bytes, s.dst_rows * reduce_row_bytes) for s in steps]
    return max(needs, default=0) + MAX_LEAVES * _ALIGNMENT


def attention_staging_bytes(
    spec: PlanSpec,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: Any = jnp.bfloat16,
    reduce_dtype: Any = jnp.float32,
) -> int:
    """Room that `dist_attention` under plans of ``spec`` needs, both passes.

    Args:
        spec: sizes of the plans.
        num_heads: query heads of the arrays on one device, times the sequences that share a plan.
        num_kv_heads: likewise.
        head_dim: of queries and keys.
        v_head_dim: of values; None is ``head_dim``.
        dtype: of q, k and v.
        reduce_dtype: in which partial gradients travel.
    """
    dims = head_dim + (head_dim if v_head_dim is None else v_head_dim)
    size, reduce_size = jnp.dtype(dtype).itemsize, jnp.dtype(reduce_dtype).itemsize
    directions = [spec.forward_stages, spec.backward_stages]
    comm = [each for stages in directions for each in stages.comm]
    comm += [stages.late.comm for stages in directions if stages.late is not None]
    stages = staging_bytes(comm, num_kv_heads * dims * size, num_kv_heads * dims * reduce_size)
    if spec.travel is None:
        return stages
    # There go dout, q, lse and delta; back come partial results with their lse, or dq, in float32.
    queries = staging_bytes(
        [spec.travel.comm], num_heads * (dims * size + 8), num_heads * (dims + 1) * 4
    )
    return max(stages, queries)
