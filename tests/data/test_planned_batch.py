"""A planned batch carries its plans in one array, which changes nothing about them."""

import functools
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.data import PlannedBatch

CAUSAL = functools.partial(mj.masks.from_segment_ids, causal=True)
WINDOW = functools.partial(mj.masks.from_segment_ids, causal=True, window=(5, 0))
IDS = np.repeat([[1, 2, 3], [1, 2, 0]], [20, 41, 3], axis=1)


@pytest.fixture(scope="module")
def plans():
    """One per mask, for two sequences; the second has other tables for its backward pass."""
    each = [mj.make_plan(CAUSAL(ids), 4, mj.PlanConfig(chunk_size=8)) for ids in IDS]
    windows = [plan.with_mask(WINDOW(ids)) for plan, ids in zip(each, IDS, strict=True)]
    stacked = []
    for group in (each, windows):
        spec = group[0].spec.union(group[1].spec)
        stacked.append(mj.stack_plans([plan.pad_to(spec) for plan in group]))
    return tuple(stacked)


@pytest.fixture(scope="module")
def planned(plans):
    return PlannedBatch.of({"ids": mj.dispatch(IDS, plans[0])}, plans)


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype == np.int32
        np.testing.assert_array_equal(x, y)


def test_plans_come_back_from_few_arrays(plans, planned):
    assert [leaf.shape[:2] for leaf in jax.tree.leaves(planned.tables)] == [(2, 4)]
    assert len(jax.tree.leaves(planned)) == 2
    assert_same(planned.plans, plans)
    assert_same(pickle.loads(pickle.dumps(planned)).plans, plans)


def test_a_batch_has_one_program_whatever_its_values(plans, planned):
    other = PlannedBatch.of(planned.packed, jax.tree.map(lambda leaf: leaf + 1, plans))
    run = jax.jit(lambda batch: batch.plans)
    assert_same(run(planned), plans)
    assert_same(run(other), other.plans)
    assert run._cache_size() == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tables_are_sharded_as_plans_are(kind, plans, planned):
    """Each device gets its part of every leaf, without communication."""
    mesh = jax.make_mesh((2, 4), ("dp", "cp"), (kind,) * 2)
    placed = jax.device_put(planned, NamedSharding(mesh, P("dp", "cp")))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda batch: batch.plans)
        assert "all-" not in run.lower(placed).compile().as_text()
        found = run(placed)
    assert_same(found, plans)
    wanted = NamedSharding(mesh, P("dp", "cp"))
    for leaf in jax.tree.leaves(found):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


def test_inside_a_shard_map(plans, planned):
    mesh = jax.make_mesh((2, 4), ("dp", "cp"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("dp", "cp"), out_specs=P("dp", "cp"))
    def run(batch):
        return batch.plans

    assert_same(run(jax.device_put(planned, NamedSharding(mesh, P("dp", "cp")))), plans)


def test_microbatches_stacked_in_front(plans, planned):
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), planned, planned)

    def body(_, batch):
        return None, batch.plans

    scanned = jax.jit(lambda batches: jax.lax.scan(body, None, batches)[1])(both)
    for stacked in (both.plans, scanned):
        assert_same(jax.tree.map(operator.itemgetter(1), stacked), plans)
