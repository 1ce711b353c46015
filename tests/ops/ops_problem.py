"""Inputs for tests of attention on one device, and programs that many masks share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.masks import AttnMask
from magi_jax.ops import flex_flash_attention
from magi_jax.plan import slice_table
from magi_jax.testing import oracle
from magi_jax.testing.cases import mask_cases

SIZE, K_SIZE = 151, 241  # queries and keys: two tiles, the second short; primes
IMPLEMENTATIONS = ("cpu", "reference")

# Largest error against the oracle, relative to the largest value: float32 sums of some hundred products,
# and two roundings of the narrow types (operands are exact; out and gradients are rounded once, and delta
# is made from a rounded out).
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}


@dataclasses.dataclass(frozen=True)
class Heads:
    """Head counts and dims."""

    q: int
    kv: int
    dim: int
    v_dim: int

    def __str__(self):
        return f"N{self.q}K{self.kv}H{self.dim}Hv{self.v_dim}"


def pad(mask: AttnMask) -> AttnMask:
    """The mask with rows and keys that see nothing appended up to the common lengths."""
    return mask.shift(0, 0, SIZE, K_SIZE)


@functools.cache
def all_masks() -> dict[str, AttnMask]:
    return {name: pad(mask) for name, mask in mask_cases(SIZE).items()}


@functools.cache
def shared_spec():
    """Sizes that the tables of all masks fit into, so that each program is compiled once."""
    first, *others = (slice_table(mask).spec for mask in all_masks().values())
    return first.union(*others)


def table_of(mask: AttnMask):
    return slice_table(mask, spec=shared_spec())


def tensors(rng, heads: Heads, dtype="float32", q_len=SIZE, k_len=K_SIZE):
    """q, k, v, dout, dlse: values that ``dtype`` holds exactly, dlse float32."""
    shapes = (
        (q_len, heads.q, heads.dim),
        (k_len, heads.kv, heads.dim),
        (k_len, heads.kv, heads.v_dim),
        (q_len, heads.q, heads.v_dim),
    )
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return *arrays, jnp.asarray(rng.standard_normal((q_len, heads.q)), jnp.float32)


@functools.partial(jax.jit, static_argnames=("implementation", "cap"))
def run(q, k, v, dout, dlse, table, sinks=None, *, implementation, cap=None):
    """``(out, lse)`` and the gradients of q, k, v and sinks."""

    def attend(q, k, v, sinks):
        return flex_flash_attention(
            q,
            k,
            v,
            table,
            sinks=sinks,
            logits_soft_cap=cap,
            return_residual=True,
            implementation=implementation,
        )

    results, pull_back = jax.vjp(attend, q, k, v, sinks)
    # A row without keys has lse -inf; its cotangent must not count.
    return results, pull_back((dout, dlse))


def assert_close(actual, expected, tolerance, what):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, what
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(np.isinf(actual), infinite, err_msg=f"{what}: infinities")
    error = np.abs(np.where(infinite, 0, actual) - np.where(infinite, 0, expected))
    limit = tolerance * max(np.abs(np.where(infinite, 0, expected)).max(initial=0), 1.0)
    assert error.max(initial=0) <= limit, f"{what}: error {error.max()} > {limit}"


def check_against_oracle(inputs, mask, implementation, *, sinks=None, cap=None, table=None):
    """Compares results and gradients with the dense float64 oracle."""
    q, k, v, dout, dlse = inputs
    table = table_of(mask) if table is None else table
    results, gradients = run(
        q, k, v, dout, dlse, table, sinks, implementation=implementation, cap=cap
    )
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    options = {"sinks": sinks, "logits_soft_cap": cap}
    expected = oracle.attention(*wide, mask.dense(), **options)
    expected_gradients = oracle.attention_grads(
        *wide, mask.dense(), np.asarray(dout, np.float64), np.asarray(dlse), **options
    )
    tolerance = TOLERANCE[q.dtype.name]
    for what, actual, right in zip(("out", "lse"), results, expected, strict=True):
        assert_close(actual, right, 3e-6 if what == "lse" else tolerance, what)
    for what, actual, right in zip(
        ("dq", "dk", "dv", "dsinks"), gradients, expected_gradients, strict=True
    ):
        if right is None:
            assert actual is None
        else:
            assert_close(actual, right, tolerance * (10 if what == "dsinks" else 1), what)
