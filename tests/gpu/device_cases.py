"""Random operands and comparison with the float64 oracle, for kernels on a device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from magi_jax.masks import AttnMask
from magi_jax.ops import BackwardOperands, cuda
from magi_jax.plan import slice_table
from magi_jax.testing import oracle

# Relative error in the 2-norm. Probabilities and gradients are rounded to the dtype once before a product.
TOLERANCE = {"bfloat16": 6e-3, "float16": 1e-3}
PATHS = [
    path
    for path in (cuda.SM80, cuda.SM90, cuda.SM90_ORDERED)
    if cuda.refusal(path.name, cuda.device_capability()) is None
]
needs_hopper = pytest.mark.skipif(cuda.SM90 not in PATHS, reason="needs kernels of Hopper")


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call."""

    mask: AttnMask
    dtype: str = "bfloat16"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    v_head_dim: int = 128
    scale: float | None = None
    logits_soft_cap: float = 0.0
    tile_size: int = 128
    seed: int = 0

    def operands(self) -> tuple[jax.Array, ...]:
        """q, k, v, dout of the dtype and dlse in float32, from the seed."""
        rng = np.random.default_rng(self.seed)
        T, S = self.mask.q_len, self.mask.k_len
        shapes = (
            (T, self.num_heads, self.head_dim),
            (S, self.num_kv_heads, self.head_dim),
            (S, self.num_kv_heads, self.v_head_dim),
            (T, self.num_heads, self.v_head_dim),
        )
        arrays = [jnp.asarray(rng.standard_normal(shape), self.dtype) for shape in shapes]
        return (*arrays, jnp.asarray(rng.standard_normal(shapes[0][:2]), jnp.float32))

    @property
    def options(self) -> dict[str, float]:
        """Scale and cap."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"scale": scale, "logits_soft_cap": self.logits_soft_cap}


def run(
    implementation: cuda.CudaImplementation, case: Case, operands=None
) -> dict[str, np.ndarray]:
    """Forward and backward on the device."""
    q, k, v, dout, dlse = case.operands() if operands is None else operands
    table = slice_table(case.mask, tile_size=case.tile_size)

    @jax.jit
    def both(q, k, v, dout, dlse, table):
        out, lse = implementation.forward(q, k, v, table, out_dtype=jnp.float32, **case.options)
        delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1) - dlse
        operands = BackwardOperands(dout, q, k, v, lse, delta)
        grads = implementation.backward(operands, table, dkv_dtype=jnp.float32, **case.options)
        return (out, lse, *grads)

    results = both(q, k, v, dout, dlse, table)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), map(np.asarray, results), strict=True))


def expected(case: Case, operands=None) -> dict[str, np.ndarray]:
    """The same in float64, on the operands as rounded to the dtype."""
    arrays = case.operands() if operands is None else operands
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in arrays)
    dense = case.mask.dense()
    out, lse = oracle.attention(q, k, v, dense, **case.options)
    dlse = np.where(np.isneginf(lse), 0.0, dlse)
    grads = oracle.attention_grads(q, k, v, dense, dout, dlse, **case.options)
    return {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def check(got: dict[str, np.ndarray], want: dict[str, np.ndarray], dtype: str) -> None:
    """Compares all results by relative error; rows without keys exactly."""
    empty = np.isneginf(want["lse"])
    np.testing.assert_array_equal(np.isneginf(got["lse"]), empty)
    assert not got["out"][empty].any()
    for name, reference in want.items():
        value = got[name]
        if name == "lse":
            value, reference = value[~empty], reference[~empty]
        assert np.isfinite(value).all(), f"{name} has values that are not finite"
        error = np.linalg.norm(value - reference) / max(np.linalg.norm(reference), 1e-30)
        # Where a softmax has one key, dq and dk are differences of equal numbers.
        absolute = np.abs(value - reference).max(initial=0.0)
        limit = TOLERANCE[dtype]
        assert error < limit or absolute < limit, (
            f"{name}: error {error:.2e}, at most {absolute:.2e}"
        )
