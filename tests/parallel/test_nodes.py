"""Ranks grouped into pretended nodes: rows cross between them once, and attention is exact in both
directions.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import (
    Problem,
    check,
    dispatched,
    expected,
    expected_batch,
    make_mesh,
    random_problem,
    run_with,
    shared_plans,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from magi_jax import masks
from magi_jax.parallel import DistOptions, dispatch, dist_attention
from magi_jax.plan import PlanConfig, make_plan, stack_plans
from magi_jax.plan.two_level import rows_on_links
from magi_jax.testing import cases, hlo

SIZE, SEQ_LEN = 61, 71
NEAR, FAR = True, False
BLOCK = masks.causal(SEQ_LEN) | masks.global_rows(SEQ_LEN, rows=(30, 33))
NODES = PlanConfig(
    seq_len=SEQ_LEN,
    chunk_size=4,
    roll_shifts=(),
    overlap=2,
    ranks_per_node=2,
    two_level=True,
    travelling="never",
)


@pytest.mark.parametrize(
    ("ranks_per_node", "stages", "strategy", "travelling"),
    [
        (2, (3, 2), "balanced", ((30, 33),)),
        (4, (1, 2), "zigzag", "never"),
        (2, ((FAR, NEAR, FAR), (FAR, NEAR)), "lpt", "never"),
        (4, ((NEAR, FAR), (NEAR, FAR, FAR, NEAR, NEAR)), "lpt", ((30, 33),)),
    ],
)
def test_every_mask(ranks_per_node, stages, strategy, travelling, rng):
    named = {n: m for n, m in cases.mask_cases(SIZE).items() if m.q_len == m.k_len}
    named |= {f"random_{i}": cases.random_mask(rng, SEQ_LEN, SEQ_LEN, 12) for i in range(3)}
    config = dataclasses.replace(
        NODES,
        ranks_per_node=ranks_per_node,
        overlap=stages,
        dispatch=strategy,
        travelling=travelling,
    )
    plans = shared_plans(named.values(), 8, config)
    assert plans[0].spec.ranks_per_node == ranks_per_node
    run = run_with(make_mesh(cp=8), logits_soft_cap=2.0)
    for (name, mask), plan in zip(named.items(), plans, strict=True):
        problem = random_problem(rng, SEQ_LEN)
        answer = run(dispatched(problem, plan), plan)
        whole = mask.shift(0, 0, SEQ_LEN, SEQ_LEN)
        try:
            check(answer, plan, expected(problem, whole, logits_soft_cap=2.0))
        except AssertionError as error:
            raise AssertionError(f"mask {name}") from error
    assert run._cache_size() == 1


def test_bits_are_those_of_one_step(rng):
    """The same stages in one step and in two, and one program for a plan of either kind: keys and values
    are the same to the bit, and what is computed from them. Sums between ranks are made in another order.
    """
    config = dataclasses.replace(NODES, two_level=False, overlap=(3, 3))
    plan = make_plan(BLOCK, 4, config)
    nodes = make_plan(BLOCK, 4, dataclasses.replace(config, two_level=True))
    split = plan.pad_to(plan.spec.union(nodes.spec))
    assert (plan.spec.ranks_per_node, split.spec.ranks_per_node) == (None, 2)
    problem = random_problem(rng, SEQ_LEN, heads=6, kv_heads=1)
    run = run_with(make_mesh(cp=4))
    one, two = (run(dispatched(problem, p), p) for p in (plan, split))
    for name in ("out", "lse", "dq", "dsinks"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    wanted = expected(problem, BLOCK)
    check(two, split, wanted)
    again = run(dispatched(problem, split), split)
    jax.tree.map(np.testing.assert_array_equal, again, two)
    padded = nodes.pad_to(split.spec)
    check(run(dispatched(problem, padded), padded), padded, wanted)
    assert run._cache_size() == 2


def test_kept_keys_and_narrow_sums(rng):
    plan = make_plan(BLOCK, 4, dataclasses.replace(NODES, overlap=(2, 3), travelling=((30, 33),)))
    problem = random_problem(rng, SEQ_LEN)
    options = DistOptions(keep_remote_kv=True, reduce_dtype="bfloat16")
    answer = run_with(make_mesh(cp=4), options=options)(dispatched(problem, plan), plan)
    check(answer, plan, expected(problem, BLOCK), tolerance=3e-2)


def test_kept_keys_of_own_nodes_and_others(rng):
    overlap = (NEAR, FAR, NEAR), (NEAR, FAR)
    plan = make_plan(BLOCK, 4, dataclasses.replace(NODES, overlap=overlap))
    problem = random_problem(rng, SEQ_LEN, heads=6, kv_heads=2)
    run = run_with(make_mesh(cp=4), options=DistOptions(keep_remote_kv=True))
    check(run(dispatched(problem, plan), plan), plan, expected(problem, BLOCK))


def test_a_batch_with_a_plan_for_each_sequence(rng):
    mesh = make_mesh(dp=2, cp=4)
    mask_of = [BLOCK, masks.causal(SEQ_LEN)]
    stacked = stack_plans(shared_plans(mask_of, 4, NODES))
    problem = random_problem(rng, SEQ_LEN, lead=(2,))
    run = run_with(mesh, options=DistOptions(batch_axes="dp"))
    own = Problem(**dispatch(problem.rows, stacked, axis=1), sinks=problem.sinks)
    check(run(own, stacked), stacked, expected_batch(problem, mask_of), axis=1)


def test_bytes_between_nodes_are_those_of_the_report(rng):
    """Of a program that is compiled: collectives between nodes join ranks with one place in theirs, and take
    the rows that the report counts, padded to whole blocks.
    """
    length, heads, dim, ranks_per_node = 1024, 2, 8, 4
    config = PlanConfig(
        chunk_size=32, overlap=2, roll_shifts=(), ranks_per_node=ranks_per_node, two_level=True
    )
    plan = make_plan(masks.causal(length), 8, config)
    report = plan.report()
    nodes = 8 // ranks_per_node
    distinct = sum(
        len({(p, n) for n in range(nodes) for r in node_rows(comm, n, ranks_per_node) for p in r})
        for comm in plan.comm
    )
    assert report.crossing_rows.sum() == distinct
    mesh = make_mesh(cp=8)
    array = jax.ShapeDtypeStruct(
        (8 * plan.spec.local_len, heads, dim), jnp.float32, sharding=NamedSharding(mesh, P("cp"))
    )
    placed = jax.device_put(plan, NamedSharding(mesh, P("cp")))

    def gradients(q, k, v, plan):
        attend = lambda *a: dist_attention(*a, plan, mesh=mesh).sum()  # noqa: E731
        return jax.grad(attend, argnums=(0, 1, 2))(q, k, v)

    text = jax.jit(gradients).lower(array, array, array, placed).compile().as_text()
    row_bytes = 2 * heads * dim * 4
    moved = {"across": 0, "within": 0}
    for line in text.splitlines():
        if "all-to-all(" not in line and "all-to-all-start(" not in line:
            continue
        groups = [list(map(int, g.split(","))) for g in groups_of(line)]
        crosses = {len({rank // ranks_per_node for rank in group}) > 1 for group in groups}
        assert len(crosses) == 1
        kind = "across" if crosses.pop() else "within"
        for group in groups:  # a group is a rail or a node
            places = {rank % ranks_per_node for rank in group}
            assert len(places) == (1 if kind == "across" else ranks_per_node)
        moved[kind] += hlo.collective_bytes(line)
    # Fetched in both passes, and sums return once.
    for kind in moved:
        rows = sum(
            getattr(spec, kind).wire_rows
            for spec, ways in [(s, 1) for s in plan.spec.comm]
            + [(s, 2) for s in plan.spec.backward_stages.comm]
            for _ in range(ways)
        )
        assert moved[kind] == rows * row_bytes
    assert report.collective_rows == sum(spec.wire_rows for spec in plan.spec.comm)


def groups_of(line):
    return line.split("replica_groups={{")[1].split("}}")[0].split("},{")


def node_rows(comm, node, ranks_per_node):
    """Sets of (owner, row) that cross to the relays of a node."""
    for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
        for peer, src_row, _, n_rows, _ in comm.across.recv[rank]:
            if n_rows and peer // ranks_per_node != node:
                yield {(int(peer), int(src_row) + i) for i in range(n_rows)}


def test_a_plan_in_one_step_crosses_more_often():
    config = PlanConfig(chunk_size=32, overlap=3, ranks_per_node=4, two_level=False)
    one = make_plan(masks.full(1024), 8, config)
    two = make_plan(masks.full(1024), 8, dataclasses.replace(config, two_level=True))
    counts = [plan.report(ranks_per_node=4).crossing_rows.sum() for plan in (one, two)]
    assert counts[0] == 4 * counts[1] == 4 * 1024
    assert np.array_equal(one.report().recv_rows, two.report().recv_rows)
    assert rows_on_links(two.comm[0]).sum() < rows_on_links(one.comm[0]).sum() * 1.5
