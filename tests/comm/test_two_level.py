"""Casts and reduces in two steps: the same results, and no row crosses between nodes twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transfers import DST_ROWS, SRC_ROWS, numpy_cast, numpy_reduce, pairs, random_comm

from magi_jax import masks
from magi_jax.comm import cast_in_steps, group_reduce, reduce_in_steps, two_level
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.plan.two_level import pieces_of, rows_between, rows_on_links
from magi_jax.testing import hlo


def crossings(comm, ranks_per_node):
    """Rows that move between nodes."""
    node = np.arange(comm.spec.cp_size) // ranks_per_node
    return int(rows_on_links(comm)[node[:, None] != node].sum())


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
        count = needed(comm, ranks_per_node)
        assert crossings(split, ranks_per_node) == crossings(split.across, ranks_per_node) == count
        assert rows_on_links(split.across).sum() == count
        # What comes to a relay is passed on, and what is needed at home too.
        np.testing.assert_array_equal(rows_between(split), rows_between(comm))
        found, wanted = (
            sorted((src, dst, row + i, to + i) for src, dst, row, to, n in zip(*pieces, strict=True)
                   for i in range(n))
            for pieces in (pieces_of(split), pieces_of(comm))
        )  # fmt: skip
        assert found == wanted


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_same_results_and_derivatives_as_one_step(ranks_per_node, rng):
    mesh = jax.make_mesh((8,), ("cp",), (AxisType.Auto,))

    def body(comm, x, y):
        x, y = x[0], y[0]
        cast, pull = jax.vjp(lambda x: cast_in_steps(x, comm, "cp"), x)
        reduced = reduce_in_steps(y, comm, "cp")
        flags = reduce_in_steps((y > 0, (100 * y).astype(int)), comm, "cp")
        return jax.tree.map(lambda a: a[None], (cast, reduced, pull(y)[0], flags))

    comm = random_comm(rng, 8, with_self=True)
    x = rng.normal(size=(8, SRC_ROWS, 3)).astype(np.float32)
    y = rng.normal(size=(8, DST_ROWS, 3)).astype(np.float32)
    run = jax.shard_map(body, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"))
    cast, reduced, transposed, flags = jax.jit(run)(two_level(comm, ranks_per_node), x, y)
    np.testing.assert_array_equal(cast, numpy_cast(x, comm))
    for got in (reduced, transposed):
        np.testing.assert_allclose(got, numpy_reduce(y, comm), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(flags[0], numpy_reduce(y > 0, comm) > 0)
    np.testing.assert_array_equal(flags[1], numpy_reduce((100 * y).astype(int), comm))


def test_partial_results_are_merged_as_in_one_step(rng):
    mesh = jax.make_mesh((8,), ("cp",), (AxisType.Auto,))

    def body(comm, split, out, lse):
        partials = out[0], lse[0]
        one = group_reduce(partials, comm, "cp", op="lse")
        return jax.tree.map(
            lambda a: a[None], (one, reduce_in_steps(partials, split, "cp", op="lse"))
        )

    comm = random_comm(rng, 8, with_self=True)
    out = rng.normal(size=(8, DST_ROWS, 3, 2)).astype(np.float32)
    lse = rng.normal(size=(8, DST_ROWS, 3)).astype(np.float32)
    lse[:, ::5] = -np.inf
    run = jax.shard_map(body, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"))
    one, two = jax.jit(run)(comm, two_level(comm, 2), out, lse)
    for got, want in zip(two, one, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_blocks_go_to_ranks_of_the_group_alone(rng):
    """The collectives of both steps run inside rails and inside nodes, so that padding crosses no border
    in vain.
    """
    mesh = jax.make_mesh((8,), ("cp",), (AxisType.Auto,))
    split = two_level(random_comm(rng, 8), 4)
    run = jax.shard_map(
        lambda comm, x: cast_in_steps(x, comm, "cp"),
        mesh=mesh,
        in_specs=P("cp"),
        out_specs=P("cp"),
    )
    x = jax.ShapeDtypeStruct((8 * SRC_ROWS, 3), jnp.float32)
    text = jax.jit(run).lower(split, x).compile().as_text()
    assert "{{0,4},{1,5},{2,6},{3,7}}" in text
    assert "{{0,1,2,3},{4,5,6,7}}" in text
    moved = hlo.collective_bytes(text, "all-to-all")
    assert moved == 3 * 4 * (2 * split.across.pair_rows + 4 * split.within.pair_rows)


def test_traffic_of_a_plan_falls():
    """Keys of a full mask are needed by every rank: with nodes of four they cross a quarter as often."""
    mask = masks.full(512)
    (comm,) = make_plan(mask, 8, PlanConfig(chunk_size=32, overlap=1, travelling="never")).comm
    split = two_level(comm, 4)
    assert crossings(split, 4) == needed(comm, 4)
    assert crossings(comm, 4) == 4 * crossings(split, 4)
    assert isinstance(split.across.send, np.ndarray)


def test_nodes_must_divide_the_ranks(rng):
    with pytest.raises(ValueError, match="8 ranks are not whole nodes of 3"):
        two_level(random_comm(rng, 8), 3)
