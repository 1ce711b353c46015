"""Kernels are timed over several passes of one program, each of which is really made."""

import jax
import kernels
import numpy as np
import pytest
import timing
from kernel_peers import Case, jax_passes

from magi_jax import masks
from magi_jax.ops import ffi
from magi_jax.plan import slice_table

LENGTH, REPEATS = 128, 3


@pytest.fixture
def passes():
    mask = masks.causal(LENGTH)
    case = Case("causal", np.array([LENGTH]), kernels.make_operands(LENGTH, 64), REPEATS)
    return jax_passes(kernels.ours(None), case, jax.device_put(slice_table(mask)))


@pytest.mark.parametrize(("which", "target"), [("forward", "forward"), ("backward", "backward")])
def test_a_pass_is_made_as_often_as_it_counts(passes, which, target):
    *_, program = passes.compile(which)
    name = ffi.target(f"magi_jax_ffa_{target}")
    calls = program.as_text().count(f'custom_call_target="{name}"')
    assert calls == passes.repeats == REPEATS
    assert len(getattr(passes, which)()) == REPEATS


def test_a_peer_with_other_gradients_is_timed_forward_alone(passes):
    def doubled():
        return jax.tree.map(lambda x: 2 * x, passes.backward())

    peer = passes._replace(backward=doubled)
    calls = kernels.Calls({"ours": passes, "peer": peer, "other": passes}, {}, set())
    shape = kernels.make_operands(LENGTH, 64)[0].shape
    kernels.compare(calls, shape, ["forward", "backward"])
    assert list(calls.of("forward")) == ["ours", "peer", "other"]
    assert list(calls.of("backward")) == list(calls.of("both")) == ["ours", "other"]
    assert calls.errors == {"peer": "ValueError: backward: differs from ours by 1"}


def test_a_peer_with_another_output_is_not_timed(passes):
    peer = passes._replace(forward=lambda: [2 * out for out in passes.forward()])
    calls = kernels.Calls({"ours": passes, "peer": peer}, {}, set())
    kernels.compare(calls, kernels.make_operands(LENGTH, 64)[0].shape, ["forward", "backward"])
    assert list(calls.of("forward")) == ["ours"]


def test_the_lead_is_not_timed():
    """What is slow at first does not count."""
    calls = []

    def call():
        calls.append(None)
        return jax.numpy.zeros(())

    assert timing.steady_seconds(call, lead_s=0.01, budget_s=0.01) > 0
    assert len(calls) > 4
