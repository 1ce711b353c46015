"""Layers under `jax.checkpoint` and `jax.lax.scan`, whose attention takes turns between two plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from attention_problem import count_transfers, dispatched, make_mesh, random_problem
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import dist_attention
from magi_jax.plan import PlanConfig, make_plan

SIZE = 53
CONFIG = PlanConfig(chunk_size=4, overlap=2, roll_shifts=())


@functools.cache
def layers():
    """Two masks on one dispatch, and a stack of layers that alternate between them."""
    first = masks.varlen([20, 1, 32], causal=True)
    plan = make_plan(first, 4, CONFIG)
    second = masks.local(SIZE, window=(9, 0))
    return (first, second), (plan, plan.with_mask(second, overlap=1))


def layer(attentions, x, weight):
    for attention in attentions:
        x = x + jnp.tanh(attention(x * weight, x, x[:, :2] + weight))[..., :8]
    return x


def loss_of_layers(attentions, policy, x, weights, target):
    def step(x, weight):
        return layer(attentions, x, weight), None

    if policy is not None:
        step = jax.checkpoint(step, policy=policy)
    x, _ = jax.lax.scan(step, x, weights)
    return ((x - target) ** 2).sum()


def dense_attention(dense):
    def attention(q, k, v):
        x = jnp.einsum("tnh,snh->nts", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(dense, x, -jnp.inf), axis=-1)
        return jnp.einsum("nts,snh->tnh", weights, jnp.repeat(v, q.shape[1] // v.shape[1], axis=1))

    return lambda q, k, v: attention(q, jnp.repeat(k[:, :2], 2, axis=1), v)


def sharded_layers(policy, check_vma=True, **options):
    """Gradients of the loss of all layers by x and by the weights, as a jitted function."""

    def body(x, weights, target, plans):
        def attention(plan):
            return lambda q, k, v: dist_attention(q, k[:, :2], v, plan, **options)

        loss = loss_of_layers(list(map(attention, plans)), policy, x, weights, target)
        return jax.lax.psum(loss, "cp")

    rows = P("cp")
    sharded = jax.shard_map(
        body,
        mesh=make_mesh(cp=4),
        in_specs=(rows, P(), rows, rows),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(jax.grad(sharded, argnums=(0, 1)))


SAVE_CONTEXT = jax.checkpoint_policies.save_only_these_names("context")


def test_scan_over_rematerialised_layers_with_two_plans(rng):
    both, plans = layers()
    plan = plans[0]
    problem = random_problem(rng, SIZE, v_dim=8)
    weights = rng.normal(size=3).astype(np.float32)
    arrays = dispatched(problem, plan)
    programs = {
        name: sharded_layers(policy)
        for name, policy in (
            ("plain", None),
            ("context", SAVE_CONTEXT),
            ("nothing", jax.checkpoint_policies.nothing_saveable),
        )
    }
    attentions = [dense_attention(mask.dense()) for mask in both]
    wanted = jax.grad(functools.partial(loss_of_layers, attentions, None), argnums=(0, 1))(
        problem.q, weights, problem.dout
    )
    transfers = {}
    for name, program in programs.items():
        lowered = program.lower(arrays.q, weights, arrays.dout, plans)
        transfers[name] = count_transfers(lowered)
        if name == "plain":
            continue
        dx, dweights = lowered.compile()(arrays.q, weights, arrays.dout, plans)
        back = dispatched(problem._replace(q=np.asarray(wanted[0])), plan).q
        for got, want in ((dx, back), (dweights, wanted[1])):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    # Saving the results of attention makes a second forward pass needless.
    assert transfers["plain"] == transfers["context"] < transfers["nothing"]
