"""Casts and reduces in two steps: the same results, and no row crosses between nodes twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transfers import DST_ROWS, SRC_ROWS, numpy_cast, numpy_reduce, padded, pairs, random_comm

from magi_jax import masks
from magi_jax.comm.two_level import rows_between, two_level, two_level_cast, two_level_reduce
from magi_jax.plan import PlanConfig, make_plan


def crossings(comm, ranks_per_node):
    """Rows that move between nodes."""
    node = np.arange(comm.spec.cp_size) // ranks_per_node
    return int(rows_between(comm)[node[:, None] != node].sum())


def needed(comm, ranks_per_node):
    """Distinct (row, node that needs it and does not hold it)."""
    wanted = {
        (src, src_row, dst // ranks_per_node)
        for src, src_row, dst, _ in pairs(comm)
        if src // ranks_per_node != dst // ranks_per_node
    }
    return len(wanted)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_a_row_crosses_once_for_each_node(ranks_per_node, rng):
    for with_self in (False, True):
        comm = random_comm(rng, 8, with_self=with_self)
        split = two_level(comm, ranks_per_node)
        assert crossings(split.across, ranks_per_node) == needed(comm, ranks_per_node)
        assert rows_between(split.across).sum() == needed(comm, ranks_per_node)
        assert crossings(split.within, ranks_per_node) == 0


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_same_results_and_derivatives_as_one_step(ranks_per_node, rng):
    mesh = jax.make_mesh((8,), ("cp",), (AxisType.Auto,))

    def body(comm, x, y):
        x, y = x[0], y[0]
        cast, pull = jax.vjp(lambda x: two_level_cast(x, comm, "cp"), x)
        reduced = two_level_reduce(y, comm, "cp")
        return jax.tree.map(lambda a: a[None], (cast, reduced, pull(y)[0]))

    for _ in range(2):
        comm = padded(random_comm(rng, 8, with_self=True))
        split = two_level(comm, ranks_per_node)
        x = rng.normal(size=(8, SRC_ROWS, 3)).astype(np.float32)
        y = rng.normal(size=(8, DST_ROWS, 3)).astype(np.float32)
        run = jax.shard_map(body, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"))
        cast, reduced, transposed = jax.jit(run)(split, x, y)
        np.testing.assert_array_equal(cast, numpy_cast(x, comm))
        expected = numpy_reduce(y, comm)
        np.testing.assert_allclose(reduced, expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(transposed, expected, rtol=2e-6, atol=2e-6)


def test_traffic_of_a_plan_falls():
    """A global block is needed by every rank: with nodes of four it crosses a quarter as often."""
    mask = masks.full(512)
    (comm,) = make_plan(mask, 8, PlanConfig(chunk_size=32, overlap=1, travelling="never")).comm
    split = two_level(comm, 4)
    assert crossings(split.across, 4) == needed(comm, 4)
    assert crossings(comm, 4) == 4 * crossings(split.across, 4)
    assert isinstance(split.across.send, np.ndarray)
    assert jnp.asarray(split.within.send).shape[0] == 8


def test_nodes_must_divide_the_ranks(rng):
    with pytest.raises(ValueError, match="8 ranks are not whole nodes of 3"):
        two_level(random_comm(rng, 8), 3)
