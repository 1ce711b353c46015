"""Trains a small language model on packed documents, with its attention sharded over a mesh.

    python examples/train_lm.py                                  # 8 virtual CPU devices: dp 2 x cp 4
    python examples/train_lm.py --device gpu --dp 1 --cp 8 --seq-len 262144 --features 2048 \\
        --head-dim 128 --dtype bfloat16

The documents are the source files of the Python standard library, tokenised as bytes. Layers alternate
full attention and a sliding window, both causal and both within documents, on one dispatch of the tokens.
Every batch has another mask; its plan is made in the background and is an argument of the train step, so
that the step is compiled once.
"""

import argparse
import functools
import itertools
import textwrap
from pathlib import Path

import corpus
import dense_check
import jax
import language_model
import numpy as np
import optax
import show
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj

# Sums of some 10^4 terms in another order differ by about this much, and values rounded elsewhere too.
MAX_RELATIVE_DIFFERENCE = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 2e-2}
LONGEST_CHECKED = 16_384  # a dense mask has the square of it

NEXT = """what to try next:
    python examples/train_lm.py --help                  all flags; --dispatch zigzag balances otherwise
    python examples/train_lm.py --dp 1 --cp 8           one sequence over all eight devices
    python examples/custom_mask.py                      a mask of your own, planned and drawn
    on GPUs: --device gpu --dp 1 --cp 8 --seq-len 262144 --features 2048 --head-dim 128 --dtype bfloat16
    README.md and docs/quickstart.md show how to use it in a model of yours"""


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a packed sequence")
    parser.add_argument("--window", type=int, default=512, help="keys that every other layer sees")
    parser.add_argument(
        "--dp", type=int, default=2, help="packed sequences per step, one per replica"
    )
    parser.add_argument("--cp", type=int, default=4, help="devices that share a sequence")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "gpu"), help="cpu is that of virtual devices"
    )
    language_model.add_model_flags(parser)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dispatch", default="balanced", help="or lpt, zigzag, contiguous")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-check", action="store_true", help="skip the check against dense attention"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder for the pictures")
    return parser.parse_args()


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def check_first_step(graphdef, params, packed: mj.data.Packed, masks, found, dtype: str) -> None:
    """Compares loss and gradients with dense attention on one device, tokens in their original order."""
    if (length := packed.tokens.shape[1]) > LONGEST_CHECKED:
        print(f"not checked: a dense mask of {length:,} x {length:,} is too large")
        return
    print("checking the first step against dense attention on one device ...", flush=True)
    visible = [np.stack([mask(ids).dense() for ids in packed.segment_ids]) for mask in masks]

    @jax.jit
    def dense_step(params, packed, visible):
        attends = tuple(map(dense_check.dense_attention, visible))
        return jax.value_and_grad(lambda p: language_model.mean_loss(graphdef, p, packed, attends))(
            params
        )

    params = jax.tree.map(np.asarray, params)
    dense_loss, dense_grads = dense_step(params, packed, visible)
    difference = dense_check.largest_difference(found, (dense_loss, dense_grads))
    print(
        f"  loss {float(found[0]):.6f}, dense {float(dense_loss):.6f};"
        f" largest relative difference of loss and gradients {difference:.1e}"
    )
    if difference > MAX_RELATIVE_DIFFERENCE[dtype]:
        raise SystemExit(
            f"error: this is more than rounding ({MAX_RELATIVE_DIFFERENCE[dtype]:.0e})"
        )


def count_compilations(counts: dict[str, int]) -> None:
    """Counts what XLA compiles, by the name of the jitted function."""

    def listen(event: str, _: float, **facts) -> None:
        if event.endswith("backend_compile_duration"):
            name = facts.get("fun_name", "")
            counts[name] = counts.get(name, 0) + 1

    jax.monitoring.register_event_duration_secs_listener(listen)


def describe_plans(flags, config: mj.PlanConfig, masks, segment_ids: np.ndarray) -> None:
    """Prints what the plans of one sequence balance and send, and draws them."""
    full, window = (mask(segment_ids) for mask in masks)
    plan = mj.make_plan(full, flags.cp, config)
    for name, each in (("full causal", plan), ("sliding window", plan.with_mask(window))):
        path = flags.out / f"plan_{name.replace(' ', '_')}.png"
        each.plot(path)
        report = each.report()
        kept = report.recv_rows.sum() / max(report.ring_rows.sum(), 1)
        size = mib(report.recv_bytes(flags.kv_heads, flags.head_dim, dtype=flags.dtype).sum())
        print(f"plan of {segment_ids.max()} packed document(s), {name} (picture: {path}):")
        print(textwrap.indent(str(report), "    "))
        print(
            f"    keys and values sent: {size} a layer, {kept:.1%} of a ring's or an all-gather's"
        )


def main() -> None:
    flags = parse_flags()
    mesh = language_model.start_devices(flags)
    flags.out.mkdir(parents=True, exist_ok=True)
    compilations: dict[str, int] = {}
    count_compilations(compilations)

    files = corpus.source_files()
    size = mib(sum(path.stat().st_size for path in files))
    print(f"documents: {len(files)} source files of the Python library, {size}")
    window = functools.partial(language_model.sliding_window, size=flags.window)
    masks = (language_model.full_causal, window)

    def batches(seed):
        sequences = mj.data.pack(corpus.documents(files, seed), flags.seq_len, seed=seed)
        return mj.data.batch(sequences, flags.dp)

    config = mj.PlanConfig(dispatch=flags.dispatch)
    planner = mj.data.PlanBatch(flags.cp, masks, config)
    # Long-tailed documents make rare, large plans; a look at the batches ahead takes milliseconds each.
    planner = planner.fit(batches(flags.seed), num_batches=min(flags.steps, 500))
    first, *more = itertools.islice(batches(flags.seed), 8)
    sequences = np.concatenate([packed.segment_ids for packed in (first, *more)])
    describe_plans(flags, config, masks, max(sequences, key=np.max))

    graphdef, params = nnx.split(language_model.make_model(flags), nnx.Param)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"model: {size / 1e6:.2f} M parameters, {flags.layers} layers; mesh: dp {flags.dp} x cp {flags.cp}"
        f" on {jax.devices()[0].platform}; {flags.dp} x {flags.seq_len} tokens a step"
    )
    schedule = optax.warmup_cosine_decay_schedule(
        flags.learning_rate / 10, flags.learning_rate, max(flags.steps // 8, 1), flags.steps
    )
    optimizer = optax.adamw(schedule)
    train_step = language_model.make_train_step(graphdef, optimizer)
    progress = show.Progress(flags.steps, flags.dp * flags.seq_len)
    by_token = NamedSharding(mesh, P("dp", "cp"))
    ahead = mj.data.Prefetch(batches(flags.seed), planner, sharding=by_token)
    with jax.set_mesh(mesh), ahead as planned:
        params = jax.device_put(params, NamedSharding(mesh, P()))
        opt_state = jax.device_put(optimizer.init(params), NamedSharding(mesh, P()))
        print("compiling the train step ...", flush=True)
        before = jax.tree.map(np.asarray, params)
        for step in range(flags.steps):
            params, opt_state, loss, grads = train_step(params, opt_state, next(planned))
            if step == 0 and not flags.no_check:
                check_first_step(graphdef, before, first, masks, (loss, grads), flags.dtype)
            progress.update(float(loss))
    progress.finish()
    show.plot_losses(progress.losses, flags.out / "loss.png")
    start, end = progress.losses[0], np.mean(progress.losses[-5:])
    print(
        f"loss: {start:.3f} at the first step, {end:.3f} over the last five"
        f" (picture: {flags.out / 'loss.png'})\n"
        f"train step: compiled {compilations['jit(train_step)']} time(s) for {flags.steps} batches, each with"
        " masks of its own"
    )
    print(NEXT)


if __name__ == "__main__":
    main()
