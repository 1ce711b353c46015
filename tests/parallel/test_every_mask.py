"""Distributed equals single-device, forward and backward, on every mask: one program per mesh."""

import jax
import pytest
from attention_problem import (
    check,
    dispatched,
    expected,
    make_mesh,
    random_problem,
    shared_plans,
    value_and_grads,
)

from magi_jax.parallel import dist_attention
from magi_jax.plan import PlanConfig
from magi_jax.testing import cases

SIZE, SEQ_LEN = (
    61,
    71,
)  # primes: no chunk or rank count divides them; masks are shorter than the sequence
SETUPS = [  # cp, remote stages, chunk, dispatch, soft cap
    (1, None, 71, "contiguous", None),
    (2, 1, 7, "zigzag", 3.0),
    (4, 2, 4, "balanced", None),
    (8, 3, 2, "lpt", 2.0),
]


@pytest.mark.parametrize(("cp_size", "stages", "chunk", "strategy", "cap"), SETUPS)
def test_every_mask(cp_size, stages, chunk, strategy, cap, rng):
    named = {n: m for n, m in cases.mask_cases(SIZE).items() if m.q_len == m.k_len}
    named |= {f"random_{i}": cases.random_mask(rng, SEQ_LEN, SEQ_LEN, 12) for i in range(12)}
    config = PlanConfig(
        seq_len=SEQ_LEN,
        chunk_size=chunk,
        dispatch=strategy,
        overlap=stages or "auto",
        roll_shifts=(),
    )
    plans = shared_plans(named.values(), cp_size, config)
    assert len(plans[0].comm) == (stages or 0)
    mesh = make_mesh(cp=cp_size)

    @jax.jit
    def run(problem, plan):
        def attention(q, k, v, sinks):
            return dist_attention(
                q, k, v, plan, mesh=mesh, sinks=sinks, logits_soft_cap=cap, return_residual=True
            )

        return value_and_grads(attention, problem)

    for (name, mask), plan in zip(named.items(), plans, strict=True):
        problem = random_problem(rng, SEQ_LEN)
        answer = run(dispatched(problem, plan), plan)
        whole = mask.shift(0, 0, SEQ_LEN, SEQ_LEN)
        try:
            check(answer, plan, expected(problem, whole, logits_soft_cap=cap))
        except AssertionError as error:
            raise AssertionError(f"mask {name}") from error
    assert run._cache_size() == 1
