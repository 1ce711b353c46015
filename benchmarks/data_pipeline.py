"""Step time with plans made ahead in threads, beside the same step on batches that were planned before.

    python benchmarks/data_pipeline.py                                   # virtual CPU devices
    python benchmarks/data_pipeline.py --device gpu --cp 2 --seq-len 65536 --heads 32 --kv-heads 8 \
        --head-dim 128 --dtype bfloat16

Three loops over the same number of batches, each with masks of its own (long-tailed documents; a full causal
and a sliding-window mask on one dispatch): batches that are on the devices already; batches packed, planned
and sent to the devices ahead by `mj.data.Prefetch`; and batches packed, planned and sent inside the loop. A
loop starts a step and then waits for the one before, as training loops do that log the loss of the last step.
The step is a few attention layers and matrix products, forward and backward.
"""

import argparse
import functools
import itertools
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu (virtual devices) or gpu")
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--median", type=int, default=200, help="tokens of a document")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def batches(flags: argparse.Namespace):
    rng = np.random.default_rng(0)

    def documents():
        while True:
            length = int(min(rng.lognormal(np.log(flags.median), 1.2), flags.seq_len)) + 1
            yield rng.integers(0, 256, length)

    return mj.data.batch(mj.data.pack(documents(), flags.seq_len, seed=0), 1)


def causal(ids: np.ndarray) -> mj.AttnMask:
    return mj.masks.from_segment_ids(ids, causal=True)


def local(ids: np.ndarray, *, window: int) -> mj.AttnMask:
    return mj.masks.from_segment_ids(ids, causal=True, window=(window - 1, 0))


def make_step(flags: argparse.Namespace):
    width = flags.heads * flags.head_dim

    def layer(x, weights, plan):
        qkv = (x @ weights[0]).reshape(*x.shape[:-1], -1, flags.head_dim)
        q, k, v = jnp.split(qkv, [flags.heads, flags.heads + flags.kv_heads], axis=-2)
        x = x + mj.dist_attention(q, k, v, plan).reshape(x.shape)
        return x + jax.nn.gelu(x @ weights[1]) @ weights[2]

    @jax.jit
    def step(params, batch: mj.data.PlannedBatch):
        def loss(layers):
            x = params["embed"][batch.packed.tokens]
            for i, weights in enumerate(layers):
                x = layer(x, weights, batch.plans[i % 2])
            return jnp.mean(x.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(params["layers"])

    rng = np.random.default_rng(1)
    heads = flags.heads + 2 * flags.kv_heads
    shapes = [(width, heads * flags.head_dim), (width, 4 * width), (4 * width, width)]

    def normal(shape):
        return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, flags.dtype)

    layers = [[normal(shape) for shape in shapes] for _ in range(flags.layers)]
    return step, {"embed": normal((256, width)), "layers": layers}


def timed(step, params, stream, count: int) -> tuple[float, float]:
    """Mean ms of a step, and of it the wait for the batch; the first two are left out."""
    waits, last = [], None
    for number in range(count):
        if number == 2:
            jax.block_until_ready(last)
            started = time.perf_counter()
        begin = time.perf_counter()
        batch = next(stream)
        waits.append(time.perf_counter() - begin)
        last, before = step(params, batch), last
        jax.block_until_ready(before)
    jax.block_until_ready(last)
    total = time.perf_counter() - started
    return 1e3 * total / (count - 2), 1e3 * float(np.mean(waits[2:]))


def main() -> None:
    flags = parse_flags()
    if flags.device == "cpu":
        jax.config.update("jax_num_cpu_devices", flags.cp)
        os.environ.setdefault("PJRT_NPROC", str(2 * flags.cp))
    mesh = jax.make_mesh((flags.cp,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    masks = (causal, functools.partial(local, window=flags.window))
    planner = mj.data.PlanBatch(flags.cp, masks)
    planner = planner.fit(batches(flags), num_batches=flags.batches + 10, margin=1.25)
    step, params = make_step(flags)
    rows = NamedSharding(mesh, P(None, "cp"))

    def place(batch):
        return jax.device_put(batch, rows)

    sample = list(itertools.islice(batches(flags), 10))
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for packed in sample:
        planner(packed)
    planning_ms, planning_cpu_ms = (
        (end - start) / len(sample) * 1e3
        for end, start in ((time.perf_counter(), begin), (time.process_time(), cpu_begin))
    )
    planned = planner(sample[0])
    begin = time.perf_counter()
    jax.block_until_ready([place(planned) for _ in range(10)])
    placing_ms = (time.perf_counter() - begin) / 10 * 1e3

    def work(packed):
        return place(planner(packed))

    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, P()))
        ready = [work(packed) for packed in itertools.islice(batches(flags), flags.batches)]
        jax.block_until_ready(step(params, ready[0]))
        before, _ = timed(step, params, iter(ready), flags.batches)
        options = {"depth": 4, "workers": flags.workers, "sharding": rows}
        with mj.data.Prefetch(batches(flags), planner, **options) as ahead:
            in_background, wait = timed(step, params, ahead, flags.batches)
        inside, wait_inside = timed(step, params, map(work, batches(flags)), flags.batches)
    result = {
        "device": jax.devices()[0].device_kind,
        "host_cores": os.cpu_count(),
        "flags": {k: v for k, v in vars(flags).items() if k != "out"},
        "planning_ms": round(planning_ms, 2),
        "planning_cpu_ms": round(planning_cpu_ms, 2),  # whatever else the machine does
        "placing_ms": round(placing_ms, 2),
        "step_ms": {
            "planned before": round(before, 2),
            "planned ahead": round(in_background, 2),
            "planned inside": round(inside, 2),
        },
        "wait_for_batch_ms": {
            "planned ahead": round(wait, 2),
            "planned inside": round(wait_inside, 2),
        },
        "ratio_ahead": round(in_background / before, 3),
        "ratio_inside": round(inside / before, 3),
    }
    print(json.dumps(result, indent=2))
    if flags.out is not None:
        flags.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
