"""A grain pipeline that packs, plans ahead in worker processes, and can be stopped and resumed.

    python examples/grain_pipeline.py                           # 8 virtual CPU devices, threads plan ahead
    python examples/grain_pipeline.py --workers 2               # processes plan ahead
    python examples/grain_pipeline.py --device gpu --workers 4 --cp 8 --seq-len 262144 --features 2048 \\
        --head-dim 128 --dtype bfloat16

grain packs the documents (first fit) into arrays that also MaxText uses: ``inputs``, ``targets`` and their
segment ids and positions. The planner is one more ``map`` of the pipeline. What the training loop waits for
its batches is printed at the end, and the state of the pipeline is an object that a checkpoint can hold.
"""

import argparse
import contextlib
import functools
import itertools
import time

import absl.flags
import corpus
import grain
import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that pack and plan")
    parser.add_argument("--window", type=int, default=256, help="keys that every other layer sees")
    language_model.add_training_flags(parser)
    language_model.add_model_flags(parser)
    parser.set_defaults(steps=12, dp=2, cp=4, layers=2, features=64, head_dim=16)
    return parser.parse_args()


def shifted(path, *, seq_len: int) -> dict[str, np.ndarray]:
    """A file as inputs and targets, at most a sequence long."""
    text = np.frombuffer(path.read_bytes()[: seq_len + 1], np.uint8).astype(np.int32)
    return {"inputs": text[:-1], "targets": text[1:]}


def packed_batches(flags: argparse.Namespace) -> grain.IterDataset:
    """Dictionaries of arrays ``[dp, seq_len]``; 0 is padding in every one of them."""
    files = [path for path in corpus.source_files() if path.stat().st_size > 1]
    documents = grain.MapDataset.source(files).seed(flags.seed).shuffle().repeat()
    documents = documents.map(functools.partial(shifted, seq_len=flags.seq_len)).to_iter_dataset()
    room = {"inputs": flags.seq_len, "targets": flags.seq_len}
    packed = grain.experimental.FirstFitPackIterDataset(
        documents, length_struct=room, num_packing_bins=2 * flags.dp
    )
    return packed.batch(flags.dp, drop_remainder=True)


def planned_batches(flags: argparse.Namespace) -> grain.IterDataset:
    window = functools.partial(language_model.sliding_window, size=flags.window)
    masks = (language_model.full_causal, window)
    planner = mj.data.PlanBatch(flags.cp, masks, segment_ids="inputs_segment_ids", grow=True)
    sample = itertools.islice(packed_batches(flags), 16)
    batches = packed_batches(flags).map(planner.fit(sample, margin=1.5))
    if flags.workers:
        absl.flags.FLAGS(
            ["grain_pipeline"]
        )  # grain's processes read its own flags, of which none is set
        return batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=flags.workers))
    return grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=4)


def make_train_step(graphdef, optimizer):
    @jax.jit
    def train_step(params, opt_state, batch: mj.data.PlannedBatch):
        attends = tuple(
            mj.flax.attention_fn(plan, options=language_model.OPTIONS) for plan in batch.plans
        )
        fields = batch.packed

        def loss_of(params):
            model = nnx.merge(graphdef, params)
            logits = model(fields["inputs"], fields["inputs_positions"], attends)
            weights = fields["targets_segment_ids"] > 0
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, fields["targets"])
            return jnp.sum(losses * weights) / jnp.sum(weights)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def main() -> None:
    flags = parse_flags()
    mesh = language_model.start_devices(flags)
    graphdef, params = nnx.split(language_model.make_model(flags), nnx.Param)
    optimizer = optax.adamw(flags.learning_rate)
    train_step = make_train_step(graphdef, optimizer)
    batches = iter(planned_batches(flags))
    waits, start = [], time.perf_counter()
    with jax.set_mesh(mesh):
        state = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, P()))
        for step in range(1, flags.steps + 1):
            asked = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - asked)
            batch = jax.device_put(batch, NamedSharding(mesh, P("dp", "cp")))
            *state, loss = train_step(*state, batch)
            print(f"step {step}  loss {float(loss):.3f}", flush=True)
            if step == 1:
                waits, start = [], time.perf_counter()  # it compiled, and the pipeline started
    per_step = (time.perf_counter() - start) / max(flags.steps - 1, 1)
    print(
        f"{1e3 * per_step:.1f} ms a step, of which {1e3 * np.mean(waits):.2f} ms waiting for the batch"
    )
    saved = batches.get_state()
    expected = jax.tree.leaves(next(batches))
    batches.close()  # its processes end, and what they had made ahead is given back
    with contextlib.closing(iter(planned_batches(flags))) as again:
        again.set_state(saved)
        same = all(map(np.array_equal, expected, jax.tree.leaves(next(again))))
    print(f"pipeline resumed from its state gives the same next batch: {same}")
    if not same:
        raise SystemExit("error: the resumed pipeline went on differently")


if __name__ == "__main__":
    main()
