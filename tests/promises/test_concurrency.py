"""Threads that plan and train at a time, and processes forked from one that uses JAX."""

import os
import threading
import time
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.plan import PlanConfig, PlanSpec
from magi_jax.testing import oracle

CP, CONFIG = 2, PlanConfig(chunk_size=8)
MASKS = [mj.masks.varlen(lengths, causal=True) for lengths in ([30, 34, 64], [100, 28])]


@pytest.fixture(scope="module")
def spec():
    return PlanSpec.union(*(mj.make_plan(mask, CP, CONFIG).spec for mask in MASKS))


def test_threads_plan_and_step_at_once(spec, rng):
    mesh = jax.make_mesh((CP,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:CP])
    rows = NamedSharding(mesh, P("cp"))
    arrays = [rng.standard_normal((128, heads, 8), np.float32) for heads in (4, 2, 2)]
    expected = [oracle.attention(*arrays, mask.dense())[0] for mask in MASKS]
    prints = [mj.make_plan(mask, CP, CONFIG, spec).fingerprint() for mask in MASKS]
    step = jax.jit(lambda q, k, v, plan: mj.dist_attention(q, k, v, plan, mesh=mesh))
    problems = []

    def work(which):
        for _ in range(5):
            plan = mj.make_plan(MASKS[which], CP, CONFIG, spec)
            if plan.fingerprint() != prints[which]:
                problems.append(f"mask {which} was planned otherwise")
            there = jax.device_put(([mj.dispatch(x, plan) for x in arrays], plan), rows)
            out = mj.undispatch(np.asarray(step(*there[0], there[1])), plan)
            if not np.allclose(out, expected[which], rtol=1e-4, atol=1e-5):
                problems.append(f"mask {which} gave another result")

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not problems
    assert step._cache_size() == 1


def test_planning_in_a_forked_process(spec):
    """As data loaders fork: planning and NumPy moves touch no device."""
    plan = mj.make_plan(MASKS[0], CP, CONFIG, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of forks beside threads
        child = os.fork()
    if child == 0:
        again = mj.make_plan(MASKS[0], CP, CONFIG, spec)
        tokens = np.arange(128)
        back = mj.undispatch(mj.dispatch(tokens, again), again)
        same = again.fingerprint() == plan.fingerprint() and np.array_equal(back, tokens)
        os._exit(0 if same else 3)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("planning in a forked process hangs")
