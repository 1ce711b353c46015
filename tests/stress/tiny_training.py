"""The smallest training that uses all of distributed attention: one layer, gradient descent.

A step's tokens and documents are a function of its seed, and its loss does not depend on how many
ranks there are.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import magi_jax as mj
from magi_jax.testing.cases import random_lengths

SEQ_LEN, HEADS, KV_HEADS = 251, 4, 2
CONFIG = mj.PlanConfig(seq_len=SEQ_LEN, chunk_size=8, overlap=2, roll_shifts=(-1,))
SAMPLE = range(2**40, 2**40 + 64)

Weights = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """Size of a head, dtype of attention, and how far its results may be from the oracle's."""

    head_dim: int
    dtype: str
    tolerance: float

    @property
    def features(self) -> int:
        return HEADS * self.head_dim


SMALL = Model(8, "float32", 2e-5)
FOR_CUDA = Model(64, "bfloat16", 0.05)


def packing(seed: int) -> np.ndarray:
    """Lengths of documents; they fill the sequence or a part of it."""
    rng = np.random.default_rng(seed)
    total = SEQ_LEN if rng.random() < 0.7 else int(rng.integers(1, SEQ_LEN + 1))
    return random_lengths(rng, total, float(rng.choice([2, 10, 40, 400])))


def mask_of(lengths: np.ndarray) -> mj.AttnMask:
    """Causal documents, behind them nothing."""
    return mj.masks.varlen(lengths, causal=True).shift(0, 0, SEQ_LEN, SEQ_LEN)


def tokens(seed: int, model: Model = SMALL) -> np.ndarray:
    """Activations ``[SEQ_LEN, features]``; neighbours are alike, so that there is something to learn.

    Were they not, the best answer would be 0, and training would end with outputs too small to be wrong.
    """
    noise = np.random.default_rng(seed).normal(size=(SEQ_LEN + 1, model.features))
    return ((noise[1:] + noise[:-1]) / 2**0.5).astype(np.float32)


def shared_spec(cp_size: int) -> mj.PlanSpec:
    """Sizes with room for the packings of all seeds."""
    specs = [mj.make_plan(mask_of(packing(seed)), cp_size, CONFIG).spec for seed in SAMPLE]
    return specs[0].union(*specs[1:]).scaled(2.0)


def initial_weights(model: Model = SMALL) -> dict[str, np.ndarray]:
    """Projections to q, k and v."""
    rng = np.random.default_rng(0)
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    scale = (1.28 / model.features) ** 0.5
    return {
        name: (rng.normal(size=(model.features, n * model.head_dim)) * scale).astype(np.float32)
        for name, n in heads.items()
    }


def project(x: jax.Array, weights: Weights, model: Model = SMALL) -> tuple[jax.Array, ...]:
    """q, k and v of rows ``[T, features]``."""
    return tuple(
        (x @ weights[name]).reshape(len(x), -1, model.head_dim) for name in ("q", "k", "v")
    )


def make_step(
    mesh: jax.sharding.Mesh, model: Model = SMALL
) -> Callable[..., tuple[Weights, jax.Array, jax.Array]]:
    """A jitted ``step(weights, x, plan) -> weights, loss, out``: each token predicts its successor."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights, x, plan):
        target = mj.roll(x, plan, shift=-1, mesh=mesh)

        def loss(weights):
            qkv = (part.astype(model.dtype) for part in project(x, weights, model))
            out = mj.dist_attention(*qkv, plan, mesh=mesh).astype(x.dtype)
            # Padding is zero on both sides, so that its share of the sum is 0.
            return jnp.sum((out.reshape(target.shape) - target) ** 2) / SEQ_LEN, out

        (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value, out

    return step
