"""Several masks on one dispatch: for groups of heads, for layers in turn, and for rows of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import (
    Answer,
    check,
    dispatched,
    expected,
    make_mesh,
    random_problem,
    value_and_grads,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import DistOptions, dist_attention
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.testing import cases

SIZE = 53
CONFIG = PlanConfig(chunk_size=4, overlap=2, roll_shifts=())


def attend(plan, **options):
    def attention(q, k, v, sinks):
        return dist_attention(q, k, v, plan, sinks=sinks, return_residual=True, **options)

    return attention


def some_plans(rng, groups):
    each = [cases.random_mask(rng, SIZE, SIZE, 9) for _ in range(groups)]
    first = make_plan(each[0], 4, CONFIG)
    return each, [first, *(first.with_mask(mask) for mask in each[1:])]


def part_of(problem, groups, i):
    """The heads of one group."""
    parts = {"q": 1, "k": 1, "v": 1, "sinks": 0, "dout": 1, "dlse": 1}
    return problem._replace(
        **{n: np.split(getattr(problem, n), groups, axis=axis)[i] for n, axis in parts.items()}
    )


def expected_groups(problem, each):
    answers = [expected(part_of(problem, len(each), i), mask) for i, mask in enumerate(each)]
    joined = [np.concatenate(x, axis=1 if x[0].ndim > 1 else 0) for x in zip(*answers, strict=True)]
    return Answer(*joined)


def test_masks_for_groups_of_heads(rng):
    each, plans = some_plans(rng, 2)
    problem = random_problem(rng, SIZE, heads=8, kv_heads=4)
    run = jax.jit(lambda p, plans: value_and_grads(attend(plans, mesh=make_mesh(cp=4)), p))
    answer = run(dispatched(problem, plans[0]), plans)
    check(answer, plans[0], expected_groups(problem, each))


def test_masks_for_groups_of_heads_inside_a_shard_map(rng):
    """Heads are sharded there, and each shard has the plans of its own."""
    each, plans = some_plans(rng, 2)
    problem = random_problem(rng, SIZE, heads=8, kv_heads=4)
    tensor = P("cp", "tp")

    @jax.jit
    def run(problem, plans):
        attention = jax.shard_map(
            lambda q, k, v, sinks, plans: attend(plans)(q, k, v, sinks),
            mesh=make_mesh(cp=4, tp=2),
            in_specs=(tensor, tensor, tensor, P("tp"), P("cp")),
            out_specs=(tensor, tensor),
        )
        return value_and_grads(lambda *operands: attention(*operands, plans), problem)

    wanted = expected_groups(problem, [*each, *each])
    check(run(dispatched(problem, plans[0]), plans), plans[0], wanted)


def test_groups_that_do_not_fit_are_refused(rng):
    _, plans = some_plans(rng, 3)
    q = np.zeros((4 * plans[0].spec.local_len, 4, 8), np.float32)
    mesh = make_mesh(cp=4)
    with pytest.raises(ValueError, match="3 masks are for 3 equal groups of kv heads, but k has 4"):
        dist_attention(q, q, q, plans, mesh=mesh)
    other = make_plan(masks.full(SIZE + 9), 4, CONFIG)
    with pytest.raises(ValueError, match=r"groups of heads share one dispatch.*with_mask"):
        dist_attention(q, q, q, [plans[0], other], mesh=mesh)
    for wrong in (masks.full(SIZE), [plans[0], masks.full(SIZE)]):
        with pytest.raises(TypeError, match=r"plan must be .*make_plan.*, got AttnMask"):
            dist_attention(q, q, q, wrong, mesh=mesh)
    both = make_mesh(cp=4, tp=2)
    with pytest.raises(NotImplementedError, match=r"sharded over .* a plan for each group"):
        dist_attention(q, q, q, plans[:2], mesh=both, options=DistOptions(head_axes="tp"))
    explicit = make_mesh(AxisType.Explicit, cp=4, tp=2)
    x = jax.device_put(q, jax.sharding.NamedSharding(explicit, P("cp", "tp")))
    with (
        jax.set_mesh(explicit),
        pytest.raises(NotImplementedError, match="with the plans of its own heads"),
    ):
        dist_attention(x, x, x, plans[:2])


def test_layers_take_full_and_sliding_masks_in_turn(rng):
    """One step without a scan: causal, sliding and again causal layers on one layout of tokens."""
    full, sliding = masks.causal(SIZE), masks.local(SIZE, window=(7, 0))
    plan = make_plan(full, 4, CONFIG)
    plans = (plan, plan.with_mask(sliding))
    x = rng.normal(size=(SIZE, 2, 8)).astype(np.float32)
    weights = rng.normal(size=(3, 8, 8)).astype(np.float32) / 4

    def model(attentions, weights, x):
        for attention, weight in zip(attentions, weights, strict=True):
            x = x + attention(x @ weight, x)
        return (x**2).sum()

    def dense(mask):
        hidden = np.where(mask.dense(), 0.0, -np.inf)

        def attention(q, k):
            shares = jax.nn.softmax(jnp.einsum("tnh,snh->nts", q, k) * 8**-0.5 + hidden, axis=-1)
            return jnp.einsum("nts,snh->tnh", shares, k)

        return attention

    def run(weights, x, plans):
        layers = [
            lambda q, k, plan=plan: dist_attention(q, k, k, plan, mesh=make_mesh(cp=4))
            for plan in (plans[0], plans[1], plans[0])
        ]
        return model(layers, weights, x)

    wanted = jax.jit(jax.grad(lambda w: model([dense(m) for m in (full, sliding, full)], w, x)))(
        weights
    )
    got = jax.jit(jax.grad(run))(weights, dispatched_rows(x, plan), plans)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def dispatched_rows(x, plan):
    problem = random_problem(np.random.default_rng(0), SIZE)
    return dispatched(problem._replace(q=x), plan).q


def test_a_batch_as_one_packed_stream(rng):
    """Rows of a batch, each under its own mask, planned together: ranks share all of them."""
    rows = [masks.causal(20), masks.varlen([3, 17]), masks.local(20, window=(4, 0))]
    mask = masks.concatenate(rows)
    plan = make_plan(mask, 4, CONFIG)
    problem = random_problem(rng, mask.q_len)
    run = jax.jit(lambda p, plan: value_and_grads(attend(plan, mesh=make_mesh(cp=4)), p))
    check(run(dispatched(problem, plan), plan), plan, expected(problem, mask))
