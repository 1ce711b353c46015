"""Meshes of which some axes are explicit and others automatic."""

import jax
import numpy as np
import pytest
from attention_problem import (
    check,
    dispatched,
    expected_batch,
    random_problem,
    shared_plans,
    value_and_grads,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax.parallel import DistOptions, dispatch, dist_attention, roll, undispatch
from magi_jax.plan import PlanConfig, stack_plans
from magi_jax.testing import cases

SIZE = 37
MIXED = pytest.mark.parametrize(
    "kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)]
)


def _mesh_and_plan(kinds, rng):
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), axis_types=kinds, devices=jax.devices()[:4])
    masks = [cases.random_mask(rng, SIZE, SIZE, 6) for _ in range(2)]
    plan = stack_plans(shared_plans(masks, 2, PlanConfig(chunk_size=4, overlap=1)))
    return mesh, masks, plan


@MIXED
def test_attention(kinds, rng):
    mesh, masks, plan = _mesh_and_plan(kinds, rng)
    problem = random_problem(rng, SIZE, lead=(2,))
    options = DistOptions(batch_axes="dp")

    @jax.jit
    def run(problem, plan):
        def attention(q, k, v, sinks):
            return dist_attention(q, k, v, plan, sinks=sinks, return_residual=True, options=options)

        return value_and_grads(attention, problem)

    with jax.set_mesh(mesh):
        moved = dispatched(problem, plan, axis=1)
        rows = jax.device_put(moved.rows, NamedSharding(mesh, P("dp", "cp")))
        answer = run(type(moved)(**rows, sinks=moved.sinks), plan)
    check(answer, plan, expected_batch(problem, masks), axis=1)


@MIXED
def test_tokens(kinds, rng):
    mesh, _, plan = _mesh_and_plan(kinds, rng)
    tokens = rng.integers(0, 99, (2, SIZE)).astype(np.int32)

    @jax.jit
    def there_and_back(tokens, plan):
        spec = P("dp")
        moved = dispatch(tokens, plan, spec=spec)
        shifted = roll(moved, plan, -1, spec=spec)
        return undispatch(moved, plan, spec=spec), undispatch(shifted, plan, spec=spec)

    with jax.set_mesh(mesh):
        same, shifted = there_and_back(jax.device_put(tokens, NamedSharding(mesh, P("dp"))), plan)
    np.testing.assert_array_equal(same, tokens)
    np.testing.assert_array_equal(shifted, np.pad(tokens[:, 1:], ((0, 0), (0, 1))))
