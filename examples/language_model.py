"""The language model of the examples: its masks, its loss and its train step.

Layers take their attention as an argument of the call, so the same model runs under plans, under masks on
one device and under dense attention.
"""

import argparse
import functools
import os
from collections.abc import Sequence

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

import magi_jax as mj

# The mesh axes of the examples are automatic, and their batches are sharded over dp.
OPTIONS = mj.DistOptions(batch_axes="dp")


def start_devices(flags: argparse.Namespace) -> jax.sharding.Mesh:
    """Makes the mesh (dp, cp); on CPU out of virtual devices."""
    if flags.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", flags.dp * flags.cp)
        # Many launches in flight on virtual devices can starve each other of threads.
        os.environ.setdefault("PJRT_NPROC", str(2 * flags.dp * flags.cp))
    try:
        found = len(jax.devices(flags.device))
    except RuntimeError:  # JAX's word for none
        found = 0
    if found < flags.dp * flags.cp:
        raise SystemExit(
            f"error: --dp {flags.dp} --cp {flags.cp} is a mesh of {flags.dp * flags.cp} devices, JAX has"
            f" {found} of {flags.device}"
        )
    return jax.make_mesh((flags.dp, flags.cp), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a training run over a mesh (dp, cp)."""
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a packed sequence")
    parser.add_argument("--dp", type=int, default=1, help="packed sequences per step")
    parser.add_argument("--cp", type=int, default=8, help="devices that share a sequence")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "gpu"), help="cpu is that of virtual devices"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `make_model` reads."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--features", type=int, default=128, help="width of the residual stream")
    parser.add_argument("--head-dim", type=int, default=32, help="64, 96, 128 or 256 on a GPU")
    parser.add_argument("--kv-heads", type=int, default=2, help="key and value heads")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the computation; bfloat16 or float16 on a GPU",
    )


def decoder_config(flags: argparse.Namespace, vocab_size: int) -> mj.flax.DecoderConfig:
    return mj.flax.DecoderConfig(
        vocab_size=vocab_size,
        num_layers=flags.layers,
        features=flags.features,
        num_heads=flags.features // flags.head_dim,
        num_kv_heads=flags.kv_heads,
        head_dim=flags.head_dim,
        hidden=3 * flags.features,
        dtype=jnp.dtype(flags.dtype),
    )


def make_model(flags: argparse.Namespace) -> nnx.Module:
    config = decoder_config(flags, corpus.VOCAB_SIZE)
    return mj.flax.Decoder(config, rngs=nnx.Rngs(flags.seed))


def full_causal(segment_ids: np.ndarray) -> mj.AttnMask:
    return mj.masks.from_segment_ids(segment_ids, causal=True)


def sliding_window(segment_ids: np.ndarray, *, size: int) -> mj.AttnMask:
    return mj.masks.from_segment_ids(segment_ids, causal=True, window=(size - 1, 0))


def mean_loss(graphdef, params, packed: mj.data.Packed, attends) -> jax.Array:
    """Mean cross-entropy over the tokens that have a label."""
    model = nnx.merge(graphdef, params)
    logits = model(packed.tokens, packed.positions, attends)
    labelled = packed.labels != mj.data.NO_LABEL
    labels = jnp.where(labelled, packed.labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * labelled) / jnp.sum(labelled)


def make_train_step(
    graphdef,
    optimizer: optax.GradientTransformation,
    kinds: Sequence[int] | None = None,
    options: mj.DistOptions = OPTIONS,
):
    """One jitted step; batch and plans are arguments.

    Args:
        graphdef: static part of the model.
        optimizer: made by optax.
        kinds: which of the batch's plans each layer takes; None alternates between all of them.
        options: how and where attention runs.
    """

    @jax.jit
    def train_step(params, opt_state, batch: mj.data.PlannedBatch):
        attends = tuple(mj.flax.attention_fn(plan, options=options) for plan in batch.plans)
        if kinds is not None:
            attends = tuple(attends[kind] for kind in kinds)
        loss_of = functools.partial(mean_loss, graphdef, packed=batch.packed, attends=attends)
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    return train_step
