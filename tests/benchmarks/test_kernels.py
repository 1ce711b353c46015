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


def test_the_lead_is_not_timed():
    """What is slow at first does not count."""
    calls = []

    def call():
        calls.append(None)
        return jax.numpy.zeros(())

    assert timing.steady_seconds(call, lead_s=0.01, budget_s=0.01) > 0
    assert len(calls) > 4
