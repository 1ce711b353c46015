"""Full, sliding-window and chunked layers in one model, on one dispatch of the tokens.

    python examples/hybrid_layers.py                                  # 8 virtual CPU devices, one sequence
    python examples/hybrid_layers.py --pattern wwwwwf --window 128    # five windows to one full layer
    python examples/hybrid_layers.py --device gpu --cp 8 --seq-len 262144 --window 4096 --features 2048 \\
        --head-dim 128 --dtype bfloat16

Layers are letters: f full causal, w causal sliding window, c causal inside chunks (as in Llama 4). The first
kind decides which rank holds which tokens; put the costliest first. What the others send and compute then is
printed before training starts.
"""

import argparse
import functools
import itertools

import corpus
import jax
import language_model
import numpy as np
import optax
import show
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pattern", default="fwwcww", help="kinds of the layers, repeated")
    parser.add_argument("--window", type=int, default=256, help="keys that a window layer sees")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk of a c layer")
    language_model.add_training_flags(parser)
    language_model.add_model_flags(parser)
    parser.set_defaults(steps=15, seq_len=4096, layers=6, features=64, head_dim=16)
    return parser.parse_args()


def chunked_causal(segment_ids: np.ndarray, *, size: int) -> mj.AttnMask:
    """Chunks are counted from the start of each document; padding at the end sees nothing."""
    lengths = np.bincount(segment_ids)[1:]
    return mj.masks.chunked_causal(lengths, size)


def describe(plans: dict[str, mj.AttentionPlan], flags: argparse.Namespace) -> None:
    """What each kind of layer computes and sends on the common dispatch."""
    names = {"f": "full", "w": f"window {flags.window}", "c": f"chunks of {flags.chunk}"}
    print(f"{'kind':<14}{'pairs':>14}{'imbalance':>11}{'rows received, worst rank':>27}")
    for kind, plan in plans.items():
        report = plan.report()
        share = report.recv_rows.max() / max(report.ring_rows.max(), 1)
        print(
            f"{names[kind]:<14}{report.area.sum():>14,}{report.imbalance:>11.3f}"
            f"{report.recv_rows.max():>18,} ({share:.0%})"
        )
    print("(in brackets: of what a ring or an all-gather would bring that rank)")


def main() -> None:
    flags = parse_flags()
    mesh = language_model.start_devices(flags)
    masks = {
        "f": language_model.full_causal,
        "w": functools.partial(language_model.sliding_window, size=flags.window),
        "c": functools.partial(chunked_causal, size=flags.chunk),
    }
    pattern = "".join(itertools.islice(itertools.cycle(flags.pattern), flags.layers))
    if not set(pattern) <= set(masks):
        raise SystemExit(f"error: --pattern is made of {sorted(masks)}, got {flags.pattern!r}")
    kinds = list(dict.fromkeys(pattern))
    files = corpus.source_files()

    def batches():
        documents = corpus.documents(files, flags.seed)
        return mj.data.batch(mj.data.pack(documents, flags.seq_len, seed=flags.seed), flags.dp)

    planner = mj.data.PlanBatch(flags.cp, tuple(masks[kind] for kind in kinds))
    planner = planner.fit(batches(), num_batches=flags.steps)
    ids = next(batches()).segment_ids[0]
    first = mj.make_plan(masks[kinds[0]](ids), flags.cp)
    others = {kind: first.with_mask(masks[kind](ids)) for kind in kinds[1:]}
    describe({kinds[0]: first, **others}, flags)

    graphdef, params = nnx.split(language_model.make_model(flags), nnx.Param)
    optimizer = optax.adamw(flags.learning_rate)
    which = [kinds.index(kind) for kind in pattern]
    train_step = language_model.make_train_step(graphdef, optimizer, which)
    progress = show.Progress(flags.steps, flags.dp * flags.seq_len)
    print(f"training {flags.layers} layers {pattern}; compiling the step ...", flush=True)
    by_token = NamedSharding(mesh, P("dp", "cp"))
    ahead = mj.data.Prefetch(batches(), planner, sharding=by_token)
    with jax.set_mesh(mesh), ahead as planned:
        state = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, P()))
        for batch in itertools.islice(planned, flags.steps):
            *state, loss, _ = train_step(*state, batch)
            progress.update(float(loss))
    progress.finish()


if __name__ == "__main__":
    main()
