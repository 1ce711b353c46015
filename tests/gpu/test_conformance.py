"""The conformance suite of tests/ops on the device, with head dims and a dtype that CUDA kernels have."""

import functools

import ops_problem as problem
import pytest
import test_attention_conformance as suite
from device_cases import PATHS


@pytest.fixture(params=[path.name for path in PATHS])
def implementation(request, monkeypatch):
    monkeypatch.setattr(suite, "PLAIN", problem.Heads(4, 2, 128, 128))
    monkeypatch.setattr(problem, "tensors", functools.partial(problem.tensors, dtype="bfloat16"))
    return request.param


# Left out: tests that compare at float32's precision, and head dims that are refused.
test_every_mask = suite.test_every_mask
test_soft_cap = suite.test_soft_cap
test_sinks = suite.test_sinks
test_random_masks = suite.test_random_masks
test_lengths = suite.test_lengths
test_hidden_values_do_not_leak = suite.test_hidden_values_do_not_leak
test_causal_future_does_not_leak = suite.test_causal_future_does_not_leak
