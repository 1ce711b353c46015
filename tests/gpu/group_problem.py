"""Running group collectives with a native and with the portable transport, and comparing bits."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

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
