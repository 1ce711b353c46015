"""Pairs of thread blocks of the Hopper forward, which walk the keys of two tiles together."""

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
TILE = 16  # tokens of a tile of 8 heads; a pair has two
FEW, MANY, CUT = 300, 2300, 5000  # keys that three kernels take


def unlike_partners(keys: int) -> dict[str, masks.AttnMask]:
    """Masks under which the tiles of a pair see different keys, or only one of them sees any."""

    def join(*rectangles: tuple[int, int, int, int]) -> masks.AttnMask:
        """Of ``(tokens, keys, first token, first key)``."""
        parts = (
            masks.full(rows, width).shift(row, key, 3 * TILE + 5, keys)
            for rows, width, row, key in rectangles
        )
        return functools.reduce(operator.or_, parts)

    return {
        "first_alone": join((TILE, keys, 0, 0)),
        "second_alone": join((TILE, keys - 7, TILE, 5)),
        "apart": join((TILE, 100, 0, 3), (TILE, 90, TILE, keys - 95)),
        "one_row_of_the_next": join((2 * TILE + 1, keys, 0, 0)),
        "documents": join(
            (7, 50, 0, 0), (20, 120, 7, 50), (6, 1, 27, 170), (9, keys - 180, 35, 180)
        ),
    }


def attend(case: Case, operands, accumulate=None):
    """`out` in float32 and `lse`."""
    table = slice_table(case.mask)
    results = cuda.SM90.forward(
        *operands, table, out_dtype=jnp.float32, accumulate=accumulate, **case.options
    )
    return tuple(map(np.asarray, results[:2]))


def compare(case: Case, got, want) -> None:
    names = ("out", "lse")
    check(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)), case.dtype)


def expected(case: Case, operands):
    return oracle.attention(
        *(np.asarray(x, np.float64) for x in operands), case.mask.dense(), **case.options
    )


@pytest.mark.parametrize("keys", [FEW, MANY, CUT])
@pytest.mark.parametrize("name", list(unlike_partners(FEW)))
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [("bfloat16", dims) for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))]
    + [("float16", (128, 128))],
)
def test_partners_that_see_different_keys(name, keys, dtype, dims):
    case = Case(unlike_partners(keys)[name], dtype, 8, 1, *dims)
    operands = case.operands()[:3]
    got = attend(case, operands)
    compare(case, got, expected(case, operands))
    for first, again in zip(got, attend(case, operands), strict=True):
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("tokens", [1, TILE - 1, TILE + 1, 2 * TILE + 1, 130])
@pytest.mark.parametrize("heads", [(8, 1), (16, 2), (4, 1), (12, 2)])
def test_sequences_that_end_inside_a_pair(tokens, heads):
    case = Case(masks.causal(tokens, MANY, offset=MANY - tokens), "bfloat16", *heads)
    operands = case.operands()[:3]
    compare(case, attend(case, operands), expected(case, operands))


@pytest.mark.parametrize("keys", [FEW, MANY, CUT])
def test_pairs_that_see_nothing_keep_earlier_results(keys):
    case = Case(unlike_partners(keys)["second_alone"], "bfloat16", 8, 1)
    operands = case.operands()[:3]
    out, lse = expected(case, operands)
    rng = np.random.default_rng(1)
    before = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    total = np.logaddexp(before[1], lse)
    shares = (np.exp(x - total)[..., None] for x in (before[1], lse))
    want = sum(share * x for share, x in zip(shares, (before[0], out), strict=True))
    earlier = tuple(jnp.asarray(x, jnp.float32) for x in before)
    compare(case, attend(case, operands, accumulate=earlier), (want, total))


@pytest.mark.parametrize("rows", [MANY, MANY // 2], ids=["all see keys", "half do"])
def test_more_tiles_than_thread_blocks(rows):
    """Pairs take one pair of tiles after the other, empty ones among them; each of the 66 gets 8."""
    mask = masks.full(rows, MANY).shift(0, 0, MANY, MANY)
    case = Case(mask, "bfloat16", 64, 8, 64, 64)
    q, k, v = case.operands()[:3]
    out, lse = attend(case, (q, k, v))
    for group in (0, 7):
        heads = slice(8 * group, 8 * (group + 1))
        of_group = q[:, heads], k[:, group : group + 1], v[:, group : group + 1]
        compare(case, (out[:, heads], lse[:, heads]), expected(case, of_group))


def test_grouped_heads_run_in_pairs():
    q = jax.ShapeDtypeStruct((100, 8, 128), jnp.bfloat16)
    table = slice_table(masks.full(100, MANY))
    for kv_heads, in_pairs in ((1, True), (4, True), (8, False)):
        k = jax.ShapeDtypeStruct((MANY, kv_heads, 128), jnp.bfloat16)
        assert ("in pairs" in cuda.SM90.describe(q, k, k, table).splitlines()[0]) == in_pairs
