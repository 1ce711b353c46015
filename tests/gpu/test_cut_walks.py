"""Walks that the Hopper forward cuts along keys, because a call has few of them, against float64."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import Case, check, needs_hopper

from magi_jax import masks
from magi_jax.ops import cuda
from magi_jax.plan import slice_table
from magi_jax.testing import oracle

pytestmark = needs_hopper
KEYS = 5000


def long_walks() -> dict[str, masks.AttnMask]:
    """Few queries of many keys each: in one run and in several, with gaps, and beside rows of nothing."""
    full, part = masks.full(100, KEYS), masks.causal(30, 2000, offset=1970)
    ends = (masks.full(70, n).shift(0, at, 70, KEYS) for n, at in ((1500, 0), (1200, 2900)))
    return {
        "full": full,
        "causal": masks.causal(200, KEYS, offset=KEYS - 200),
        "gaps": functools.reduce(operator.or_, ends),
        "one_query": masks.full(1, 4200),
        "stage": part.shift(300, 100, 1000, KEYS) | masks.full(9, KEYS).shift(700, 0, 1000, KEYS),
    }


def attend(case: Case, operands, accumulate=None, with_row_max=False):
    """`out` in float32 and `lse` of the Hopper forward."""
    table = slice_table(case.mask)
    return cuda.SM90.forward(
        *operands, table, out_dtype=jnp.float32, accumulate=accumulate, with_row_max=with_row_max,
        **case.options,
    )[:2]  # fmt: skip


def expected(case: Case, operands) -> tuple[np.ndarray, np.ndarray]:
    arrays = (np.asarray(x, np.float64) for x in operands)
    return oracle.attention(*arrays, case.mask.dense(), **case.options)


def compare(case: Case, got, want) -> None:
    names = ("out", "lse")
    results = dict(zip(names, map(np.asarray, got), strict=True))
    check(results, dict(zip(names, want, strict=True)), case.dtype)


@pytest.mark.parametrize(
    ("name", "dims"),
    [(name, (128, 128)) for name in long_walks()]
    + [("stage", dims) for dims in ((64, 64), (96, 96), (192, 128), (256, 256))],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cut_walks_are_right_and_repeat_their_bits(name, dtype, dims):
    case = Case(long_walks()[name], dtype, 8, 2, *dims)
    operands = case.operands()[:3]
    got = attend(case, operands)
    compare(case, got, expected(case, operands))
    for _ in range(3):
        for first, again in zip(got, attend(case, operands), strict=True):
            np.testing.assert_array_equal(np.asarray(first), np.asarray(again))


def test_walks_are_cut():
    """Whole walks, as those of calls that ask for maxima are, round differently."""
    case = Case(long_walks()["full"], num_heads=8, num_kv_heads=2)
    operands = case.operands()[:3]
    whole, cut = (attend(case, operands, with_row_max=asked)[0] for asked in (True, False))
    assert (np.asarray(whole) != np.asarray(cut)).any()


@pytest.mark.parametrize("name", ["causal", "stage"])
def test_cut_walks_are_added_to_earlier_results(name):
    case = Case(long_walks()[name], num_heads=8, num_kv_heads=2)
    operands = case.operands()[:3]
    rng = np.random.default_rng(1)
    out, lse = expected(case, operands)
    before = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    before[1][::5] = -np.inf
    before[0][::5] = 0.0
    total = np.logaddexp(before[1], lse)
    base = np.where(np.isneginf(total), 0.0, total)
    shares = (np.exp(x - base)[..., None] for x in (before[1], lse))
    want = sum(share * x for share, x in zip(shares, (before[0], out), strict=True))
    earlier = tuple(jnp.asarray(x, jnp.float32) for x in before)
    compare(case, attend(case, operands, accumulate=earlier), (want, total))


@pytest.mark.parametrize("growth", [0.5, 8.0])
def test_later_pieces_may_outgrow_earlier_ones(growth):
    case = Case(long_walks()["full"], scale=2.0, num_heads=8, num_kv_heads=2)
    q, k, v = case.operands()[:3]
    ramp = jnp.linspace(0.01, growth, KEYS)[:, None, None]
    operands = q, (k * ramp).astype(k.dtype), v
    compare(case, attend(case, operands), expected(case, operands))


@pytest.mark.parametrize("key", [3, 2400, KEYS - 1])
def test_hidden_values_that_are_not_finite_stay_hidden(key):
    halves = (masks.full(50, n).shift(at, 0, 100, KEYS) for n, at in ((KEYS, 0), (2000, 50)))
    case = Case(functools.reduce(operator.or_, halves), num_heads=8, num_kv_heads=2)
    q, k, v = case.operands()[:3]
    hidden = np.asarray(case.mask.dense())[:, key] == 0
    clean = expected(case, (q, k.at[key].set(0), v.at[key].set(0)))
    got = jax.block_until_ready(attend(case, (q, k, v.at[key].set(jnp.nan))))
    assert np.isnan(np.asarray(got[0])[~hidden]).all()
    if hidden.any():
        out = np.asarray(got[0])[hidden]
        assert np.linalg.norm(out - clean[0][hidden]) < 6e-3 * np.linalg.norm(clean[0][hidden])
