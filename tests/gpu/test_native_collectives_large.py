"""Rows of more than 2^32 elements and bytes between two GPUs; what kernels cannot count is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_problem import mesh_of, sharded

from magi_jax.comm import group_cast, group_reduce, symmetric_memory
from magi_jax.plan import CommMeta, CommSpec

PRIME = 65521  # of rows: what wraps at a power of two meets another value


def swap(rows: int) -> CommMeta:
    """Each of two ranks gets all rows of the other."""
    pieces = np.array([[[1, 0, 0, rows, 0]], [[0, 0, 0, rows, 0]]], np.int32)
    return CommMeta(pieces, pieces, CommSpec(2, rows, rows, pair_rows=rows, self_rows=0, pieces=1))


def wrong_rows(rows: int, width: int, dtype, collective) -> list[int]:
    """How many rows of each rank did not become those of the other."""

    def body(comm, start):
        value = (jnp.arange(rows) + start) % PRIME
        x = jnp.broadcast_to(value[:, None].astype(dtype), (rows, width))
        moved = collective(x, comm)
        expected = ((jnp.arange(rows) + 12345 - start) % PRIME).astype(dtype).astype(moved.dtype)
        same = jnp.all(moved == expected[:, None], axis=1)
        return rows - jnp.sum(same, dtype=jnp.int32)

    start = np.array([0, 12345], np.int32)
    return np.asarray(sharded(body, mesh_of(2))(swap(rows), start)).tolist()


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (524_301, 8192, jnp.uint16),  # 2^32 elements, by bulk copies
        (150_001, 7999 * 4, jnp.uint8),  # 2^32 bytes in words of 4
    ],
)
def test_casts(rows, width, dtype):
    with symmetric_memory(mesh_of(2), "cp", timeout_s=20.0) as memory:

        def cast(x, comm):
            return group_cast(x, comm, "cp", transport=memory.transport)

        assert wrong_rows(rows, width, dtype, cast) == [0, 0]
        memory.check()


def test_sums():
    with symmetric_memory(mesh_of(2), "cp", timeout_s=20.0) as memory:

        def reduce(x, comm):
            return group_reduce(x, comm, "cp", transport=memory.transport)

        assert wrong_rows(300_007, 8192, jnp.float32, reduce) == [0, 0]
        memory.check()


def test_too_many_bytes_one_by_one_are_refused():
    with symmetric_memory(mesh_of(2), "cp", timeout_s=20.0) as memory:

        def cast(x, comm):
            return group_cast(x, comm, "cp", transport=memory.transport)

        # Rows of an odd number of 2-byte elements are moved byte by byte.
        with pytest.raises(jax.errors.JaxRuntimeError, match="too large: kernels count"):
            wrong_rows(262_200, 8191, jnp.uint16, cast)
