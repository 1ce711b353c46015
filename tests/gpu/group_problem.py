"""Running group collectives with a native and with the portable transport, and comparing bits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transfers import DST_ROWS, SRC_ROWS, numpy_cast, numpy_reduce, padded, random_comm

from magi_jax.comm import SymmetricMemory, group_cast, group_reduce
from magi_jax.plan import CommMeta

# Cases of `symmetric_memory`; a MiB holds what the tests move.
PLACEMENTS = {"direct": {}, "staged": {"placement": "staged", "staging_bytes": 1 << 20}}
# With so many blocks casts write to their peers instead of reading from them.
WAYS: dict[str, dict] = PLACEMENTS | {"pushed": {"num_blocks": 16}}


def mesh_of(cp_size: int) -> Mesh:
    return jax.make_mesh((cp_size,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:cp_size])


def sharded(fn: Callable, mesh: Mesh) -> Callable:
    """``fn(comm, *arrays)`` on the shards of ``[cp, rows, ...]``, the axis of ranks taken off."""

    def body(comm, *arrays):
        out = fn(comm, *jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: a[None], out)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))


def in_both_ways(fn: Callable, mesh: Mesh, transport) -> Callable:
    """``fn(transport, comm, *arrays)`` run natively; its result must equal the portable one's bits."""
    native, portable = (
        sharded(lambda *args, t=t: fn(t, *args), mesh) for t in (transport, "portable")
    )

    def run(*args):
        results = native(*args)
        assert_same_bits(results, portable(*args))
        return results

    return run


def assert_same_bits(actual, expected) -> None:
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def normal(rng, *shape) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def on_devices(mesh: Mesh, tree):
    """Arrays ``[cp, rows, ...]`` that every process has, each rank's part on its device."""
    place = NamedSharding(mesh, P("cp"))
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, place, lambda index: a[index]), tree
    )


def check_plans_in_a_row(mesh: Mesh, memory: SymmetricMemory, rng, count: int = 1000) -> None:
    """One program, a new table each time, results compared on the device; nothing grows.

    Rows hold small integers, whose sums are exact.
    """

    def body(comm, x, cast, y, reduced):
        moved = group_cast(x, comm, "cp", transport=memory.transport)
        summed = group_reduce(y, comm, "cp", transport=memory.transport)
        return jnp.maximum(jnp.max(jnp.abs(moved - cast)), jnp.max(jnp.abs(summed - reduced)))

    run = sharded(body, mesh)
    x, y = (
        rng.integers(-99, 99, (mesh.size, rows, 64)).astype(np.float32)
        for rows in (SRC_ROWS, DST_ROWS)
    )
    spec = padded(random_comm(rng, mesh.size, with_self=True)).spec
    worst, in_use = [], []
    for step in range(count):
        comm = padded(random_comm(rng, mesh.size, with_self=bool(step % 2)))
        comm = CommMeta(comm.send, comm.recv, spec)
        arrays = comm, x, numpy_cast(x, comm), y, numpy_reduce(y, comm).astype(np.float32)
        worst.append(run(*on_devices(mesh, arrays)))
        if step % 100 == 99:
            jax.block_until_ready(worst)
            memory.check()
            in_use.append([device.memory_stats()["bytes_in_use"] for device in mesh.local_devices])
    for w in worst:
        assert all(float(shard.data[0]) == 0.0 for shard in w.addressable_shards)
    assert run._cache_size() == 1
    assert np.ptp(np.array(in_use[1:]), axis=0).max() < 1 << 20
