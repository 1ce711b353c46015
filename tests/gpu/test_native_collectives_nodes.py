"""Transfers in two steps over the native transport: two GPUs of one host, taken for two nodes or for one."""

import functools

import jax
import numpy as np
import pytest
from group_problem import PLACEMENTS, in_both_ways, mesh_of, normal, sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transfers import DST_ROWS, SRC_ROWS, numpy_cast, padded, random_comm

from magi_jax import masks
from magi_jax.comm import cast_in_steps, reduce_in_steps, symmetric_memory, two_level
from magi_jax.parallel import DistOptions
from magi_jax.parallel.dist_attention import dist_attention
from magi_jax.plan import PlanConfig, make_plan

placements = pytest.mark.parametrize("placement", PLACEMENTS)


@placements
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_same_bits_as_the_portable_transport(ranks_per_node, placement, rng):
    def move(transport, comm, x, y):
        cast = cast_in_steps(x, comm, "cp", transport=transport)
        return cast, reduce_in_steps(y, comm, "cp", transport=transport)

    def merge(transport, comm, out, lse):
        return reduce_in_steps((out, lse), comm, "cp", op="lse", transport=transport)

    mesh = mesh_of(2)
    with symmetric_memory(mesh, "cp", timeout_s=30.0, **PLACEMENTS[placement]) as memory:
        comm = padded(random_comm(rng, 2, with_self=True))
        split = two_level(comm, ranks_per_node)
        x, y = (normal(rng, 2, rows, 700) for rows in (SRC_ROWS, DST_ROWS))
        cast, _ = in_both_ways(move, mesh, memory.transport)(split, x, y)
        np.testing.assert_array_equal(cast, numpy_cast(x, comm))
        partials = normal(rng, 2, DST_ROWS, 3, 40), normal(rng, 2, DST_ROWS, 3)
        merged = (
            sharded(functools.partial(merge, transport), mesh)(split, *partials)
            for transport in (memory.transport, "portable")
        )
        for native, portable in zip(*merged, strict=True):
            np.testing.assert_allclose(native, portable, rtol=2e-6, atol=2e-6)
        memory.check()


@placements
def test_distributed_attention_and_its_gradients(placement, rng):
    """Forward a stage of the own node, which is empty here, and one in two steps; backward four in two steps,
    so that sums of three cross at once.
    """
    mesh = mesh_of(2)
    mask = masks.varlen([300, 500, 224], causal=True)
    config = PlanConfig(
        chunk_size=64,
        overlap=((True, False), 4),
        ranks_per_node=1,
        two_level=True,
        travelling="never",
    )
    plan = make_plan(mask, 2, config)
    assert plan.spec.ranks_per_node == 1
    rows, place = 2 * plan.spec.local_len, NamedSharding(mesh, P("cp"))
    q, k, v, dout = (jax.device_put(normal(rng, rows, heads, 16), place) for heads in (4, 2, 2, 4))
    plan = jax.device_put(plan, place)
    with symmetric_memory(mesh, "cp", timeout_s=30.0, **PLACEMENTS[placement]) as memory:

        def gradients(transport):
            options = DistOptions(implementation="reference", transport=transport)

            def both(q, k, v, plan, dout):
                out, pull = jax.vjp(
                    lambda *a: dist_attention(*a, plan, mesh=mesh, options=options),
                    q, k, v,
                )  # fmt: skip
                return out, *pull(dout)

            return jax.jit(both)(q, k, v, plan, dout)

        native, portable = gradients(memory.transport), gradients("portable")
        memory.check()
    for x, y in zip(native, portable, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
