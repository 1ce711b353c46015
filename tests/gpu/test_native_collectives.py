"""The native group collectives between the GPUs of one process, against the portable ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_problem import (
    PLACEMENTS,
    WAYS,
    check_plans_in_a_row,
    in_both_ways,
    mesh_of,
    normal,
    sharded,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transfers import DST_ROWS, SRC_ROWS, numpy_cast, numpy_reduce, padded, random_comm

from magi_jax import masks
from magi_jax.comm import group_cast, group_reduce, symmetric_memory
from magi_jax.parallel import DistOptions
from magi_jax.parallel.dist_attention import dist_attention
from magi_jax.plan import CommMeta, PlanConfig, make_plan

SIZES = [size for size in (2, 4, 8) if size <= jax.device_count()]
sizes = pytest.mark.parametrize("cp_size", SIZES)
placements = pytest.mark.parametrize("placement", PLACEMENTS)
ways = pytest.mark.parametrize("placement", WAYS)
within_a_process = pytest.mark.parametrize("placement", ["direct", "pushed"])


def open_memory(mesh, placement="direct", timeout_s=30.0):
    return symmetric_memory(mesh, "cp", timeout_s=timeout_s, **WAYS[placement])


@sizes
@ways
@pytest.mark.parametrize("with_self", [False, True])
def test_same_bits_as_the_portable_transport(cp_size, with_self, placement, rng):
    def both(transport, comm, x, y):
        cast, cast_vjp = jax.vjp(lambda x: group_cast(x, comm, "cp", transport=transport), x)
        reduced, reduce_vjp = jax.vjp(lambda y: group_reduce(y, comm, "cp", transport=transport), y)
        return cast, reduced, cast_vjp(y), reduce_vjp(x)

    mesh = mesh_of(cp_size)
    with open_memory(mesh, placement) as memory:
        for width in (1, 3, 40, 700, 1024):
            run = in_both_ways(both, mesh, memory.transport)
            like = {"a": (2, width), "b": (), "c": (width,)}
            for _ in range(2):
                comm = padded(random_comm(rng, cp_size, with_self=with_self))
                x = {name: normal(rng, cp_size, SRC_ROWS, *shape) for name, shape in like.items()}
                y = {name: normal(rng, cp_size, DST_ROWS, *shape) for name, shape in like.items()}
                x["c"], y["c"] = x["c"].astype(jnp.bfloat16), y["c"].astype(jnp.bfloat16)
                cast, reduced, _, _ = run(comm, x, y)
                memory.check()
                np.testing.assert_array_equal(cast["a"], numpy_cast(x["a"], comm))
                expected = numpy_reduce(y["a"], comm)
                np.testing.assert_allclose(reduced["a"], expected, rtol=2e-6, atol=2e-6)


@sizes
def test_all_dtypes_and_more_leaves_than_a_call_takes(cp_size, rng):
    mesh = mesh_of(cp_size)
    comm = padded(random_comm(rng, cp_size, with_self=True))

    def arrays(rows, width):
        x = normal(rng, cp_size, rows, width)
        kinds = {"ids": np.int32, "count": np.uint32, "half": np.float16, "brain": jnp.bfloat16}
        return {
            "seen": x > 0,
            **{name: (9 * np.abs(x)).astype(kind) for name, kind in kinds.items()},
            **{f"x{i}": normal(rng, cp_size, rows, i) for i in range(1, 7)},
        }

    def cast(transport, comm, x):
        return group_cast(x, comm, "cp", transport=transport)

    def reduce(transport, comm, y):
        return group_reduce(y, comm, "cp", transport=transport, out_dtype=None)

    with open_memory(mesh) as memory:
        small = normal(rng, cp_size, SRC_ROWS, 5).astype(np.uint8)
        in_both_ways(cast, mesh, memory.transport)(comm, {**arrays(SRC_ROWS, 3), "u8": small})
        in_both_ways(reduce, mesh, memory.transport)(comm, arrays(DST_ROWS, 8))
        with pytest.raises(NotImplementedError, match=r"adds float32, .*; got uint8"):
            sharded(lambda c, y: reduce(memory.transport, c, y), mesh)(
                comm, np.zeros((cp_size, DST_ROWS), np.uint8)
            )


@sizes
def test_narrow_wire_and_wide_sums(cp_size, rng):
    mesh = mesh_of(cp_size)
    comm = padded(random_comm(rng, cp_size))

    def reduce(transport, comm, y):
        return (
            group_reduce(y, comm, "cp", wire_dtype=jnp.bfloat16, transport=transport),
            group_reduce(
                y.astype(jnp.float16), comm, "cp", out_dtype=jnp.float32, transport=transport
            ),
        )

    with open_memory(mesh) as memory:
        in_both_ways(reduce, mesh, memory.transport)(comm, normal(rng, cp_size, DST_ROWS, 24))


@sizes
def test_lse_merge_and_its_gradients(cp_size, rng):
    mesh = mesh_of(cp_size)
    comm = padded(random_comm(rng, cp_size, with_self=True))
    out, lse = normal(rng, cp_size, DST_ROWS, 3, 8), 5 * normal(rng, cp_size, DST_ROWS, 3)
    unseen = rng.random((cp_size, DST_ROWS)) < 0.3
    lse[unseen], out[unseen] = -np.inf, 0
    cotangents = normal(rng, cp_size, SRC_ROWS, 3, 8), normal(rng, cp_size, SRC_ROWS, 3)

    def merge(transport, comm, out, lse, dout, dlse):
        def f(out, lse):
            return group_reduce((out, lse), comm, "cp", op="lse", transport=transport)

        merged, pull = jax.vjp(f, out, lse)
        return merged, pull((dout, dlse))

    with open_memory(mesh) as memory:
        native, portable = (
            sharded(lambda *args, t=t: merge(t, *args), mesh)(comm, out, lse, *cotangents)
            for t in (memory.transport, None)
        )
    for x, y in zip(jax.tree.leaves(native), jax.tree.leaves(portable), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@ways
def test_a_thousand_plans_in_a_row(placement, rng):
    mesh = mesh_of(SIZES[-1])
    with open_memory(mesh, placement) as memory:
        check_plans_in_a_row(mesh, memory, rng)


@within_a_process
def test_a_peer_that_never_comes_is_named(placement, rng):
    """Rank 0 waits for one that makes no call: NaN, then an error with rank and call."""
    mesh = mesh_of(2)
    comm = padded(random_comm(rng, 2))

    def one_sided(comm, x):
        alone = jax.lax.axis_index("cp") == 0
        cast = lambda x: group_cast(x, comm, "cp", transport=memory.transport)  # noqa: E731
        nothing = lambda x: jnp.zeros((DST_ROWS, *x.shape[1:])) + x[0, 0]  # noqa: E731
        return jax.lax.cond(alone, cast, nothing, x)

    with open_memory(mesh, placement, timeout_s=0.5) as memory:
        x = normal(rng, 2, SRC_ROWS, 8)
        moved = sharded(one_sided, mesh)(comm, x)
        assert np.isnan(moved[0]).all()
        message = r"rank 0 .* gave up in call 1 \(group_cast\) .*: rank 1 did not come within 0.5"
        with pytest.raises(RuntimeError, match=message):
            memory.check()
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(sharded(one_sided, mesh)(comm, x))


@within_a_process
def test_plans_that_differ_are_caught(placement, rng):
    mesh = mesh_of(2)
    comm = padded(random_comm(rng, 2))
    other = padded(random_comm(rng, 2))
    tables = ((comm.send, other.send), (comm.recv, other.recv))
    mixed = CommMeta(*(np.stack([mine[0], theirs[1]]) for mine, theirs in tables), comm.spec)
    with open_memory(mesh, placement, timeout_s=10) as memory:
        cast = sharded(lambda c, x: group_cast(x, c, "cp", transport=memory.transport), mesh)
        moved = cast(mixed, normal(rng, 2, SRC_ROWS, 8))
        assert np.isnan(moved).all()
        assert "has a plan that differs from this rank's" in memory.failure()


@within_a_process
def test_damaged_tables_stay_inside_the_buffers(placement, rng):
    """The same random bytes at both ends: wrong rows or none, no fault, and the card lives on."""
    mesh = mesh_of(2)
    comm = padded(random_comm(rng, 2))
    low, high = -(2**31), 2**31 - 1
    for _ in range(3):
        wild = rng.integers(low, high, comm.send.shape, dtype=np.int64).astype(np.int32)
        near = rng.integers(-9, 60, comm.send.shape).astype(np.int32)
        for table in (wild, near):
            table[1] = table[0]
            table[..., 0] = rng.integers(0, 2, table.shape[:2])
            table[0, :, 0], table[1, :, 0] = 1, 0
            hostile = CommMeta(table, table, comm.spec)
            with open_memory(mesh, placement, timeout_s=10) as memory:

                def both(comm, x, y, t=memory.transport):
                    cast = group_cast(x, comm, "cp", transport=t)
                    return cast, group_reduce(y, comm, "cp", transport=t)

                y = normal(rng, 2, DST_ROWS, 8)
                jax.block_until_ready(sharded(both, mesh)(hostile, normal(rng, 2, SRC_ROWS, 8), y))
                memory.check()


@placements
@pytest.mark.parametrize("overlap", [2, "late"])
def test_distributed_attention_and_its_gradients(overlap, placement, rng):
    """All stages of both passes, or late queries, on the stream of the collectives, against the portable
    transport.
    """
    mesh = mesh_of(2)
    mask = masks.varlen([300, 500, 224], causal=True)
    plan = make_plan(mask, 2, PlanConfig(chunk_size=128, overlap=overlap, travelling="never"))
    rows = 2 * plan.spec.local_len
    place = NamedSharding(mesh, P("cp"))
    q, k, v, dout = (jax.device_put(normal(rng, rows, heads, 16), place) for heads in (4, 2, 2, 4))
    plan = jax.device_put(plan, place)
    # Attention stays float32 and in XLA: what differs is what moves the rows.
    with open_memory(mesh, placement) as memory:

        def gradients(transport):
            def f(q, k, v, plan):
                options = DistOptions(implementation="reference", transport=transport)
                return dist_attention(q, k, v, plan, mesh=mesh, options=options)

            def both(q, k, v, plan, dout):
                out, pull = jax.vjp(lambda *a: f(*a, plan), q, k, v)
                return out, *pull(dout)

            return jax.jit(both)(q, k, v, plan, dout)

        native, portable = gradients(memory.transport), gradients("portable")
        memory.check()
    for x, y in zip(native, portable, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@placements
def test_many_calls_of_one_program_that_nothing_orders(placement, rng):
    """All may be in flight at once; half of them have equal keys, of which XLA must not make one."""
    mesh, calls = mesh_of(2), 10
    plan = make_plan(masks.causal(128), 2, PlanConfig(chunk_size=32, overlap=1, travelling="never"))
    place = NamedSharding(mesh, P("cp"))
    rows = 2 * plan.spec.local_len
    qs = [jax.device_put(normal(rng, rows, 4, 16), place) for _ in range(calls)]
    keys = [jax.device_put(normal(rng, rows, 2, 16), place) for _ in range(calls // 2 + 1)]
    plan = jax.device_put(plan, place)
    with open_memory(mesh, placement) as memory:

        def gradients(transport):
            options = DistOptions(implementation="reference", transport=transport)

            def loss(qs, keys, plan):
                pairs = zip(qs, keys + keys[-1:] * (calls - len(keys)), strict=True)
                outs = [dist_attention(q, k, k, plan, mesh=mesh, options=options) for q, k in pairs]
                return sum(out.sum() for out in outs), outs

            return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(qs, keys, plan)

        native, portable = gradients(memory.transport), gradients("portable")
        memory.check()
    for x, y in zip(jax.tree.leaves(native), jax.tree.leaves(portable), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_refusals(rng):
    mesh = mesh_of(2)
    comm = padded(random_comm(rng, 2))
    x = normal(rng, 2, SRC_ROWS, 3)
    with pytest.raises(ValueError, match="staged operands need room"):
        symmetric_memory(mesh, "cp", placement="staged")
    with pytest.raises(ValueError, match=r"nvshmem.* is for ranks in several processes"):
        symmetric_memory(mesh, "cp", placement="nvshmem", staging_bytes=64)
    with symmetric_memory(mesh, "cp", placement="staged", staging_bytes=64) as memory:
        cast = sharded(lambda c, x: group_cast(x, c, "cp", transport=memory.transport), mesh)
        with pytest.raises(jax.errors.JaxRuntimeError, match="has room for 64 bytes"):
            jax.block_until_ready(cast(comm, x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="it was closed"):
        jax.block_until_ready(cast(comm, x))
