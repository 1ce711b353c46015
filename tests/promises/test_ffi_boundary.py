"""Handlers refuse what is wrong with a call and touch no memory, and the next call is as before.

`make sanitize` runs this file with the address sanitizer, which sees what a read past a buffer
returns to nobody.
"""

import dataclasses

import ffi_mutants
import jax
import numpy as np
import pytest

import magi_jax as mj

DIRECTIONS = ("magi_jax_ffa_forward", "magi_jax_ffa_backward")
TARGETS = [name + suffix for name in DIRECTIONS for suffix in ("", "_accumulate")]


@pytest.fixture(params=TARGETS)
def call(request, monkeypatch):
    return ffi_mutants.package_calls(monkeypatch)[request.param]


def test_hostile_table_entries(call, rng, request):
    count = 3000 if request.config.getoption("--extensions", None) else 300
    expected = call.run()
    refused = 0
    for _ in range(count):
        mutant = ffi_mutants.with_hostile_integers(rng, call)
        refused += _is_refused(mutant, ("slices", "by_query", "by_key"))
    assert 0 < refused < count, "some entries are padding, others are not"
    for x, y in zip(expected, call.run(), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mutate", ffi_mutants.STRUCTURAL_MUTANTS)
def test_hostile_structure(call, mutate, rng):
    expected = call.run()
    refused = sum(_is_refused(mutate(rng, call)) for _ in range(10))
    assert refused
    for x, y in zip(expected, call.run(), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("walk", ["by_query", "by_key"])
def test_an_order_that_leaves_a_tile_out_is_refused(walk, rng):
    """Nobody would write its rows."""
    q = rng.normal(size=(300, 1, 8)).astype(np.float32)
    table = mj.slice_table(mj.masks.causal(300))
    runs = getattr(table, walk)._replace(order=np.array([2, 0, 2], np.int32))
    damaged = dataclasses.replace(table, **{walk: runs})
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"each of 3 tiles once"):
        jax.grad(lambda q: mj.flex_flash_attention(q, q, q, damaged).sum())(q)


def test_head_dims_past_the_scratch_are_refused(rng):
    q = rng.normal(size=(1, 1, 2**16 + 1)).astype(np.float32)
    refusal = (ValueError, jax.errors.JaxRuntimeError)
    with pytest.raises(refusal, match="head dims of up to 65536, got 65537 and 1"):
        mj.flex_flash_attention(q, q, q[..., :1], mj.masks.full(1), implementation="cpu")
    largest = q[..., :-1]
    out = mj.flex_flash_attention(largest, largest, q[..., :1], mj.masks.full(1))
    np.testing.assert_allclose(out, q[..., :1], rtol=1e-6)


def _is_refused(call, names=("",)):
    before = [x.copy() for x in call.operands]
    message = ""
    try:
        call.run()
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        message = str(error)
    for x, y in zip(call.operands, before, strict=True):
        np.testing.assert_array_equal(x, y)
    if message:
        assert "INVALID_ARGUMENT" in message
        assert any(name in message for name in names), message
    return bool(message)
