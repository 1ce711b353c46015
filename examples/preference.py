"""Preference training with a shared question: question and answers lie in one sequence, once.

    python examples/preference.py                 # 8 virtual CPU devices: 2 sequences over 4 devices each
    python examples/preference.py --device gpu --dp 1 --cp 8 --seq-len 131072 --features 2048 \\
        --head-dim 128 --dtype bfloat16

Each document is a question, the answer that is preferred and one that is not. Both answers see the question
and themselves, not each other (`mj.masks.shared_question`), so the question is embedded, sent and computed
once. The loss is that of direct preference optimisation (arXiv:2305.18290) against the initial model. The
questions are beginnings of source files; the preferred answer is what follows, the other one is what follows
backwards.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator

import corpus
import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
import show
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj

QUESTION, PREFERRED, OTHER = 0, 1, 2  # parts of a document
BEGIN = 0  # an answer begins with this byte, whose next token is the first of the answer


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--question", type=int, default=96, help="tokens of a question, about")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer, about")
    parser.add_argument("--beta", type=float, default=0.1, help="strength of the preference")
    language_model.add_training_flags(parser)
    language_model.add_model_flags(parser)
    parser.set_defaults(dp=2, cp=4, learning_rate=1e-3, layers=2, features=64, head_dim=16)
    return parser.parse_args()


def documents(flags: argparse.Namespace) -> Iterator[list[np.ndarray]]:
    """Endless questions with a preferred and another answer."""
    rng = np.random.default_rng(flags.seed)
    for text in corpus.documents(corpus.source_files(), flags.seed):
        sizes = flags.question, flags.answer, flags.answer
        question, *lengths = (int(mean * rng.uniform(0.5, 1.5)) for mean in sizes)
        if len(text) > question + max(lengths):
            preferred, other = (text[question : question + length] for length in lengths)
            answers = (np.append(BEGIN, part) for part in (preferred, other[::-1]))
            yield [text[:question], *answers]


def sequences(flags: argparse.Namespace) -> Iterator[dict[str, np.ndarray]]:
    """Packs documents into sequences; ``segment_ids`` number the parts of all documents from 1."""
    room, parts = flags.seq_len, []
    for document in documents(flags):
        size = sum(map(len, document))
        if size > room:
            yield lay_out(parts, flags.seq_len)
            room, parts = flags.seq_len, []
        room -= size
        parts += document


def lay_out(parts: list[np.ndarray], seq_len: int) -> dict[str, np.ndarray]:
    """Answers go on with the positions of their question; labels are in answers only."""
    names = ("tokens", "segment_ids", "positions", "labels")
    fields = {name: np.zeros(seq_len, np.int32) for name in names}
    start = 0
    for i, part in enumerate(parts):
        here = slice(start, start + len(part))
        first = 0 if i % 3 == QUESTION else len(parts[i - i % 3])
        fields["tokens"][here], fields["segment_ids"][here] = part, i + 1
        fields["positions"][here] = first + np.arange(len(part))
        if i % 3 != QUESTION:
            fields["labels"][start : start + len(part) - 1] = part[1:]
        start += len(part)
    return fields


def shared_question(segment_ids: np.ndarray) -> mj.AttnMask:
    lengths = np.bincount(segment_ids)[1:].reshape(-1, 3)
    return mj.masks.shared_question(lengths[:, QUESTION], lengths[:, PREFERRED:].tolist())


def answer_log_probs(graphdef, params, batch, attend, num_parts: int) -> jax.Array:
    """Log probability of every part ``[R, num_parts]``; tokens of a part may lie on several devices."""
    model = nnx.merge(graphdef, params)
    logits = model(batch["tokens"], batch["positions"], (attend,))
    log_probs = -optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    of_part = jax.nn.one_hot(batch["segment_ids"] - 1, num_parts)
    return jnp.einsum("rt,rtp->rp", log_probs * (batch["labels"] > 0), of_part)


def make_train_step(graphdef, initial, optimizer, flags, num_parts: int):
    @jax.jit
    def train_step(params, opt_state, batch: mj.data.PlannedBatch):
        attend = mj.flax.attention_fn(batch.plans[0], options=language_model.OPTIONS)
        score = functools.partial(
            answer_log_probs, graphdef, batch=batch.packed, attend=attend, num_parts=num_parts
        )
        before = score(initial).reshape(-1, 3)

        def loss_of(params):
            gain = score(params).reshape(-1, 3) - before
            margin = gain[:, PREFERRED] - gain[:, OTHER]
            present = before[:, PREFERRED] != 0  # the last documents of a sequence may be missing
            losses = -jax.nn.log_sigmoid(flags.beta * margin) * present
            right = (margin > 0) & present
            return losses.sum() / present.sum(), right.sum() / present.sum()

        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, accuracy

    return train_step


def main() -> None:
    flags = parse_flags()
    mesh = language_model.start_devices(flags)
    num_parts = 3 * (flags.seq_len // ((flags.question + 2 * flags.answer) // 2) + 1)

    def batches():
        stream = sequences(flags)
        while group := list(itertools.islice(stream, flags.dp)):
            yield {name: np.stack([each[name] for each in group]) for name in group[0]}

    planner = mj.data.PlanBatch(flags.cp, (shared_question,)).fit(
        batches(), num_batches=flags.steps
    )
    lengths = np.bincount(next(batches())["segment_ids"][0])[1:].reshape(-1, 3)
    apart = 2 * lengths[:, QUESTION].sum() + lengths[:, PREFERRED:].sum()
    print(
        f"{len(lengths)} documents in the first sequence; {lengths.sum():,} tokens with a shared question,"
        f" {apart:,} if each answer had its own copy"
    )
    graphdef, params = nnx.split(language_model.make_model(flags), nnx.Param)
    optimizer = optax.adam(flags.learning_rate)
    progress = show.Progress(flags.steps, flags.dp * flags.seq_len)
    print("compiling the train step ...", flush=True)
    everywhere, by_token = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp", "cp"))
    ahead = mj.data.Prefetch(batches(), planner, sharding=by_token)
    with jax.set_mesh(mesh), ahead as planned:
        params, opt_state = jax.device_put((params, optimizer.init(params)), everywhere)
        train_step = make_train_step(graphdef, params, optimizer, flags, num_parts)
        accuracies = []
        for batch in itertools.islice(planned, flags.steps):
            params, opt_state, loss, accuracy = train_step(params, opt_state, batch)
            progress.update(float(loss))
            accuracies.append(float(accuracy))
    progress.finish()
    print(
        f"loss {progress.losses[0]:.3f} (log 2 before the first step) to {progress.losses[-1]:.3f};"
        f" {np.mean(accuracies[-3:]):.0%} of the last preferred answers gained more than the other"
    )


if __name__ == "__main__":
    main()
