"""Options of `dist_attention` that only a program, or two runs of it, can show."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from magi_jax import masks
from magi_jax.ops import cuda
from magi_jax.parallel import DistOptions, dispatch, dist_attention
from magi_jax.plan import PlanConfig, make_plan

SIZE = 61
MASK = masks.varlen([40, 21], causal=True)
CONFIG = PlanConfig(chunk_size=4, overlap=2, roll_shifts=(), travelling="never")


@pytest.fixture
def plan():
    return make_plan(MASK, 4, CONFIG)


@pytest.fixture
def tensors(plan, rng):
    shapes = ((SIZE, 4, 8), (SIZE, 2, 8), (SIZE, 2, 8))
    return tuple(dispatch(rng.standard_normal(s).astype(np.float32), plan) for s in shapes)


def four_ranks():
    return jax.make_mesh((4,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:4])


def gradients(options, policy=None):
    mesh = four_ranks()

    def loss(q, k, v, plan):
        attend = lambda q, k, v: dist_attention(q, k, v, plan, mesh=mesh, options=options)  # noqa: E731
        attend = attend if policy is None else jax.checkpoint(attend, policy=policy)
        return (attend(q, k, v) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def test_repeats_give_equal_bits_over_ranks(plan, tensors):
    run = gradients(DistOptions(deterministic=True))
    first, *others = (run(*tensors, plan) for _ in range(4))
    for again in others:
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)


def test_kernels_without_a_fixed_order_are_refused(plan, tensors):
    mesh = four_ranks()
    with pytest.raises(NotImplementedError, match=r"'sm90' has no fixed order of sums.*sm80"):
        dist_attention(
            *tensors,
            plan,
            mesh=mesh,
            options=DistOptions(implementation="sm90", deterministic=True),
        )
    assert cuda.for_capability((9, 0), deterministic=True).is_deterministic


def test_a_policy_keeps_remote_keys(plan, tensors):
    """Two stages of K and V, whose gradients return: what a policy keeps is not fetched again."""
    policies = jax.checkpoint_policies
    kept = DistOptions(keep_remote_kv=True)
    transfers = {
        name: gradients(options, policy)
        .lower(*tensors, plan)
        .as_text()
        .count("stablehlo.all_to_all")
        for name, options, policy in (
            ("nothing", kept, policies.nothing_saveable),
            ("context", DistOptions(), policies.save_only_these_names("context")),
            ("keys", kept, policies.save_only_these_names("context", "remote_kv")),
        )
    }
    # Fetched, (in a second forward pass, or for the gradients alone, fetched again,) and returned.
    assert transfers == {"nothing": 12, "context": 12, "keys": 8}
