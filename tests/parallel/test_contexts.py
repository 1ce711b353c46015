"""`dist_attention` wherever a user may call it from: equal to the float64 oracle in every context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import (
    check,
    count_transfers,
    dispatched,
    expected,
    expected_batch,
    make_mesh,
    random_problem,
    shared_plans,
    value_and_grads,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import DistOptions, dist_attention
from magi_jax.plan import PlanConfig, make_plan, stack_plans
from magi_jax.testing import cases, hlo

SIZE = 53
CONFIG = PlanConfig(chunk_size=4, overlap=2, roll_shifts=())
BOTH = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def some_mask(rng):
    return cases.random_mask(rng, SIZE, SIZE, 12)


def attend(plan, **options):
    def attention(q, k, v, sinks):
        return dist_attention(q, k, v, plan, sinks=sinks, return_residual=True, **options)

    return attention


@pytest.mark.parametrize(
    ("check_vma", "plan_spec"), [(True, P("cp")), (True, P()), (False, P("cp"))]
)
def test_inside_a_shard_map(check_vma, plan_spec, rng):
    mask = some_mask(rng)
    plan = make_plan(mask, 4, CONFIG)
    problem = random_problem(rng, SIZE)

    @jax.jit
    def run(problem, plan):
        rows = P("cp")
        attention = jax.shard_map(
            lambda q, k, v, sinks, plan: attend(plan)(q, k, v, sinks),
            mesh=make_mesh(cp=4),
            in_specs=(rows, rows, rows, P(), plan_spec),
            out_specs=(rows, rows),
            check_vma=check_vma,
        )
        return value_and_grads(lambda *operands: attention(*operands, plan), problem)

    check(run(dispatched(problem, plan), plan), plan, expected(problem, mask))


def test_gradient_taken_inside_a_shard_map(rng):
    """The loss is a psum there; the sinks are replicated, so their gradient is summed over ranks."""
    mask = some_mask(rng)
    plan = make_plan(mask, 4, CONFIG)
    problem = random_problem(rng, SIZE)

    def body(problem, plan):
        def loss(q, k, v, sinks):
            out, lse = attend(plan)(q, k, v, sinks)
            finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
            local = (out * problem.dout).sum() + (finite * problem.dlse).sum()
            return jax.lax.psum(local, "cp")

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*problem[:4])

    rows = P("cp")
    problem_specs = type(problem)(rows, rows, rows, P(), rows, rows)
    run = jax.shard_map(
        body,
        mesh=make_mesh(cp=4),
        in_specs=(problem_specs, rows),
        out_specs=(rows, rows, rows, P()),
    )
    grads = jax.jit(run)(dispatched(problem, plan), plan)
    wanted = expected(problem, mask)
    check(
        wanted._replace(
            **dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=True)),
            out=dispatched(problem._replace(dout=wanted.out), plan).dout,
            lse=dispatched(problem._replace(dlse=wanted.lse), plan).dlse,
        ),
        plan,
        wanted,
    )


def batch_problem(rng, batch, kind, mesh):
    """A batch on a dp x cp x tp mesh, with its natural shardings, and one mask for each sequence."""
    problem = random_problem(rng, SIZE, lead=(batch,))
    tensor = NamedSharding(mesh, P("dp", "cp", "tp"))

    def place(problem):
        rows = {n: jax.device_put(x, tensor) for n, x in problem.rows.items()}
        return type(problem)(**rows, sinks=problem.sinks)

    named = {} if kind == AxisType.Explicit else {"batch_axes": "dp", "head_axes": "tp"}
    options = {"options": DistOptions(**named)}
    return problem, place, options


@BOTH
def test_batch_with_one_plan_on_three_axes(kind, rng):
    mesh = make_mesh(kind, dp=2, cp=2, tp=2)
    mask = some_mask(rng)
    plan = make_plan(mask, 2, CONFIG)
    problem, place, options = batch_problem(rng, 4, kind, mesh)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda problem, plan: value_and_grads(attend(plan, **options), problem))
        operands = place(dispatched(problem, plan, axis=1)), plan
        answer = run(*operands)
        hlo.assert_no_all_gather(run.lower(*operands).compile())
    check(answer, plan, expected_batch(problem, [mask] * 4), axis=1)
    assert answer.dq.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "cp", "tp")), 4)


@pytest.mark.parametrize(("kind", "batch"), [(AxisType.Auto, 4), (AxisType.Explicit, 2)])
def test_batch_with_a_plan_for_each_sequence(kind, batch, rng):
    mesh = make_mesh(kind, dp=2, cp=2, tp=2)
    of_rows = [some_mask(rng) for _ in range(batch)]
    plan = stack_plans(shared_plans(of_rows, 2, CONFIG))
    problem, place, options = batch_problem(rng, batch, kind, mesh)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda problem, plan: value_and_grads(attend(plan, **options), problem))
        answer = run(place(dispatched(problem, plan, axis=1)), plan)
    check(answer, plan, expected_batch(problem, of_rows), axis=1)


@pytest.mark.parametrize(
    ("kind", "manual"),
    [
        (AxisType.Auto, {"cp"}),
        (AxisType.Auto, {"cp", "tp"}),
        (AxisType.Explicit, {"cp"}),
    ],
)
def test_inside_a_shard_map_over_some_axes(kind, manual, rng):
    """What is not manual yet is opened by a nested `shard_map`."""
    mesh = make_mesh(kind, dp=2, cp=2, tp=2)
    mask = some_mask(rng)
    plan = make_plan(mask, 2, CONFIG)
    problem, place, options = batch_problem(rng, 2, kind, mesh)
    tensor = P(None, "cp", "tp" if "tp" in manual else None)

    def body(q, k, v, sinks, plan):
        return attend(plan, **options)(q, k, v, sinks)

    attention = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(tensor, tensor, tensor, P(*tensor[2:]), P("cp")),
        out_specs=(tensor, tensor),
        axis_names=manual,
    )
    with jax.set_mesh(mesh):
        run = jax.jit(
            lambda problem, plan: value_and_grads(lambda *args: attention(*args, plan), problem)
        )
        # From jax 0.12 on, a shard_map over explicit axes takes its operands only as they are sharded.
        placed = jax.device_put(plan, NamedSharding(mesh, P("cp")))
        answer = run(place(dispatched(problem, plan, axis=1)), placed)
    check(answer, plan, expected_batch(problem, [mask] * 2), axis=1)


def test_vmap_over_the_stages_of_a_pipeline(rng):
    """Each stage is on devices of its own, as `spmd_axis_name` says, and nothing is gathered."""
    mesh = make_mesh(stage=2, cp=2)
    mask = some_mask(rng)
    plan = make_plan(mask, 2, CONFIG)
    problem = random_problem(rng, SIZE, lead=(2,))
    problem = problem._replace(sinks=np.stack([problem.sinks, -problem.sinks]))
    options = DistOptions(batch_axes=())  # of one stage there is no batch
    attention = jax.vmap(attend(plan, options=options), spmd_axis_name="stage")
    with jax.set_mesh(mesh):
        moved = dispatched(problem, plan, axis=1)
        placed = jax.device_put(moved.rows, NamedSharding(mesh, P("stage", "cp")))
        sinks = jax.device_put(moved.sinks, NamedSharding(mesh, P("stage")))
        run = jax.jit(lambda problem: value_and_grads(attention, problem))
        compiled = run.lower(type(moved)(**placed, sinks=sinks)).compile()
        answer = compiled(type(moved)(**placed, sinks=sinks))
    hlo.assert_no_all_gather(compiled)
    wanted = [expected(type(problem)(*(x[i] for x in problem)), mask) for i in range(2)]
    check(answer, plan, type(answer)(*map(np.stack, zip(*wanted, strict=True))), axis=1)


def test_kept_keys_and_narrow_reductions(rng):
    mask = some_mask(rng)
    plan = make_plan(mask, 4, CONFIG)
    problem = random_problem(rng, SIZE)
    arrays = dispatched(problem, plan)
    mesh = make_mesh(cp=4)
    wanted = expected(problem, mask)
    transfers = {}
    for name, options, tolerance in (
        ("fetched", DistOptions(), 2e-5),
        ("kept", DistOptions(keep_remote_kv=True), 2e-5),
        ("narrow", DistOptions(reduce_dtype=jnp.bfloat16), 3e-2),
    ):
        run = jax.jit(
            lambda problem, plan, options=options: value_and_grads(
                attend(plan, mesh=mesh, options=options), problem
            )
        )
        lowered = run.lower(arrays, plan)
        transfers[name] = count_transfers(lowered)
        check(lowered.compile()(arrays, plan), plan, wanted, tolerance=tolerance)
    # Two stages of K and V: fetched, fetched again, and their gradients returned.
    assert transfers == {"fetched": 12, "kept": 8, "narrow": 12}


@pytest.mark.parametrize(
    ("reduce_dtype", "kv_heads"), [(None, 2), ("bfloat16", 2), ("bfloat16", 4)]
)
def test_half_precision_without_sinks(reduce_dtype, kv_heads, rng):
    """Rows without keys give zeros, -inf and no NaN; results have the dtype of q, whatever travels."""
    mask = masks.varlen([30], causal=True).shift(5, 5, SIZE, SIZE)
    plan = make_plan(mask, 4, CONFIG)
    problem = random_problem(rng, SIZE, kv_heads=kv_heads)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), problem)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float32), half)
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), dispatched(exact, plan))
    options = DistOptions(reduce_dtype=reduce_dtype)

    @jax.jit
    def run(problem, plan):
        def attention(q, k, v, sinks):
            return attend(plan, mesh=make_mesh(cp=4), options=options)(q, k, v, None)

        return value_and_grads(attention, problem)

    answer = run(arrays, plan)
    assert answer.out.dtype == answer.dq.dtype == answer.dk.dtype == jnp.bfloat16
    assert answer.lse.dtype == jnp.float32
    answer = answer._replace(dsinks=np.zeros(4))
    wanted = expected(exact, mask, sinks=False)._replace(dsinks=np.zeros(4))
    check(answer, plan, wanted, tolerance=3e-2)
    assert np.isneginf(wanted.lse).any()
