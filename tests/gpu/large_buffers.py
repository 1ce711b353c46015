"""Attention over tensors of more elements than 32 bits count, whose rows repeat with a prime period.

Every row of the result must be that of the row one period after the first, which a float64 oracle checks; an
offset that wraps at 2^31 or 2^32 elements or bytes, which no period divides, leads to another row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import magi_jax as mj
from magi_jax.ops.implementations import get_implementation
from magi_jax.plan import slice_table
from magi_jax.testing import oracle

WINDOW = 127  # keys before a query that it sees


class Sizes(NamedTuple):
    """Of a problem; rows repeat after ``period``."""

    rows: int
    heads: int
    kv_heads: int
    dim: int = 128
    period: int = 5003


def check(implementation: str, sizes: Sizes, dtype: str = "bfloat16") -> dict[str, float]:
    """Largest errors of results and gradients, as shares of the largest value of each.

    Returns:
        For each of out, lse, dq, dk and dv the larger of two: the distance of any row to that of the second
        period, and of a piece of the second period to the oracle.
    """
    rng = np.random.default_rng(0)
    base = [_draw(rng, sizes, heads, dtype) for heads in (*_heads(sizes), sizes.heads)]
    table = slice_table(mj.masks.local(sizes.rows, window=(WINDOW, 0)))
    got = _attend(*base, table, implementation=implementation, rows=sizes.rows)
    first = _second_period(got, sizes.period)
    spread = jax.tree.map(np.asarray, _spread(got, first, sizes.period))
    exact = _exact_piece(base, sizes)
    errors = {}
    for name, rows, apart in zip(("out", "lse", "dq", "dk", "dv"), first, spread, strict=True):
        piece = _heads_at_ends(np.asarray(rows[: len(exact[name])], np.float64), exact[name])
        largest = np.abs(exact[name]).max()
        errors[name] = float(max(apart, np.abs(piece - exact[name]).max()) / largest)
    return errors


def check_merged(implementation: str, sizes: Sizes, dtype: str = "bfloat16") -> float:
    """Likewise for ``out`` in float32, the near half of the window merged into the result of the far half."""
    rng = np.random.default_rng(0)
    base = [_draw(rng, sizes, heads, dtype) for heads in _heads(sizes)]
    rows, middle = sizes.rows, WINDOW // 2
    masks = [
        mj.AttnMask.from_slices([[0, rows]], [[0, rows]], [band], rows)
        for band in ((-WINDOW, -middle), (1 - middle, 0))
    ]
    tables = [slice_table(mask) for mask in masks]
    got = _attend_in_two(*base, *tables, implementation=implementation, rows=rows)
    first = _second_period(got, sizes.period)
    exact = _exact_piece([*base, base[0]], sizes)["out"]
    piece = _heads_at_ends(np.asarray(first[0][: len(exact)], np.float64), exact)
    apart = float(_spread(got, first, sizes.period)[0])
    return float(max(apart, np.abs(piece - exact).max()) / np.abs(exact).max())


def _heads(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.heads, sizes.kv_heads, sizes.kv_heads


def _draw(rng, sizes: Sizes, heads: int, dtype: str) -> jax.Array:
    return jnp.asarray(rng.standard_normal((sizes.period, heads, sizes.dim), np.float32), dtype)


@jax.jit(static_argnames=("implementation", "rows"))
def _attend(q, k, v, dout, table, *, implementation, rows):
    place = jnp.arange(rows) % len(q)
    q, k, v, dout = (jnp.take(x, place, axis=0) for x in (q, k, v, dout))

    def attend(q, k, v):
        return mj.flex_flash_attention(
            q, k, v, table, return_residual=True, implementation=implementation
        )

    (out, lse), pull_back = jax.vjp(attend, q, k, v)
    return (out, lse, *pull_back((dout, jnp.zeros_like(lse))))


@jax.jit(static_argnames=("implementation", "rows"))
def _attend_in_two(q, k, v, far, near, *, implementation, rows):
    place = jnp.arange(rows) % len(q)
    q, k, v = (jnp.take(x, place, axis=0) for x in (q, k, v))
    chosen = get_implementation(implementation)
    options = {"scale": q.shape[-1] ** -0.5, "logits_soft_cap": 0.0}
    partial = chosen.forward(q, k, v, far, out_dtype=jnp.float32, **options)
    return chosen.forward(q, k, v, near, accumulate=partial, **options)


@jax.jit(static_argnames="period")
def _second_period(results, period):
    return [x[period : 2 * period] for x in results]


@jax.jit(static_argnames="period")
def _spread(results, first, period):
    """The largest distance of any row to its like; keys of the last window lack queries, and are left out."""
    rows = jnp.arange(len(results[0]))
    inside = (rows >= period) & (rows < len(rows) - WINDOW)

    def spread(x, like):
        like = jnp.take(like, rows % period, axis=0).astype(jnp.float32)
        apart = jnp.abs(x.astype(jnp.float32) - like)
        # A NaN anywhere counts as infinitely far.
        apart = jnp.where(jnp.isnan(apart), jnp.inf, apart)
        return jnp.max(jnp.where(inside.reshape(-1, *[1] * (x.ndim - 1)), apart, 0.0))

    return [spread(*pair) for pair in zip(results, first, strict=True)]


def _exact_piece(base, sizes: Sizes) -> dict[str, np.ndarray]:
    """The first rows of the second period, of the first and the last kv head and its query heads."""
    margin, rows = WINDOW, 200
    group = sizes.heads // sizes.kv_heads
    # The piece begins a window before the period and ends a window after its rows; both are cut off.
    place = np.arange(-2 * margin, rows + 2 * margin) % sizes.period
    parts = [
        np.asarray(_heads_at_ends(x, None, group if i in (0, 3) else 1), np.float64)[place]
        for i, x in enumerate(base)
    ]
    dense = mj.masks.local(len(place), window=(WINDOW, 0)).dense()
    out, lse = oracle.attention(*parts[:3], dense)
    grads = oracle.attention_grads(*parts[:3], dense, parts[3])
    kept = slice(2 * margin, 2 * margin + rows)
    found = {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    return {name: x[kept] for name, x in found.items()}


def _heads_at_ends(x, like, count: int = 0):
    """The first and the last ``count`` heads, or as many as ``like`` has."""
    count = count or like.shape[1] // 2
    return np.concatenate([np.asarray(x[:, :count]), np.asarray(x[:, -count:])], axis=1)
