"""Profiles attention over several devices and says how much of its communication is hidden.

    python examples/profile_overlap.py                          # 4 virtual CPU devices
    python examples/profile_overlap.py --device gpu --cp 8 --seq-len 262144 --heads 64 --kv-heads 8 \\
        --head-dim 128 --dtype bfloat16 --documents 4

The plan predicts a timeline from its cost model (drawn into outputs/). The trace then tells what happened: it
is read here with JAX's own reader, and https://ui.perfetto.dev shows the same file. On a GPU look at the
streams of one device: casts should lie beside the attention of the stage before, and the attention kernels of
a step should follow each other without gaps. Gaps before the first remote stage mean that local work is too
short for the first cast: more tokens per rank, or another number of stages (--overlap), fill them. Virtual
CPU devices share their cores, so there the numbers only show how to read a trace.
"""

import argparse
import glob
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import language_model
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj

COLLECTIVES = r"all-to-all|all-gather|collective-permute|ragged-all-to-all|nccl"


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cp", type=int, default=4, help="devices that share the sequence")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens")
    parser.add_argument("--documents", type=int, default=3, help="packed documents")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--overlap", default="auto", help="number of remote stages, or auto")
    parser.add_argument("--steps", type=int, default=3, help="steps to trace")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "gpu"), help="cpu is that of virtual devices"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder for the picture")
    parser.add_argument("--trace", type=Path, help="folder for the trace; default: a temporary one")
    flags = parser.parse_args()
    flags.dp = 1
    return flags


def kinds_of_instructions(compiled) -> dict[str, str]:
    """What the instructions of a program do: "attention" or "communication", by name."""
    kinds = {}
    for line in compiled.as_text().splitlines():
        named = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
        if named and (target := re.search(r'custom_call_target="(magi_jax_\w+)"', line)):
            kinds[named[1]] = "attention" if "ffa" in target[1] else "communication"
        elif named and re.search(rf" ({COLLECTIVES})(-start)?\(", line):
            kinds[named[1]] = "communication"
    return kinds


def read_trace(folder: Path, kinds: dict[str, str]) -> dict[str, dict[str, list]]:
    """Intervals (begin, end) in nanoseconds of each kind, by device; all CPU devices are one."""
    files = glob.glob(str(folder / "**" / "*.xplane.pb"), recursive=True)
    found: dict[str, dict[str, list]] = {}
    for plane in jax.profiler.ProfileData.from_file(max(files)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = {name: value for name, value in event.stats if name == "hlo_op"}
                kind = kinds.get(str(stats.get("hlo_op", event.name)))
                if kind is None and re.search("nccl", event.name, re.IGNORECASE):
                    kind = "communication"
                if kind is not None:
                    of_plane = found.setdefault(plane.name, {"attention": [], "communication": []})
                    of_plane[kind].append((event.start_ns, event.start_ns + event.duration_ns))
    return found


def union(intervals: list[tuple[float, float]]) -> np.ndarray:
    """Disjoint rising intervals ``[n, 2]`` that cover the same time."""
    merged: list[list[float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.reshape(merged, (-1, 2))


def common(a: np.ndarray, b: np.ndarray) -> float:
    """Length of the time that lies in an interval of both."""
    begin = np.maximum(a[:, None, 0], b[None, :, 0])
    end = np.minimum(a[:, None, 1], b[None, :, 1])
    return float(np.maximum(end - begin, 0).sum())


def main() -> None:
    flags = parse_flags()
    mesh = language_model.start_devices(flags)
    lengths = np.full(flags.documents, flags.seq_len // flags.documents)
    lengths[-1] += flags.seq_len - lengths.sum()
    overlap = flags.overlap if flags.overlap == "auto" else int(flags.overlap)
    plan = mj.make_plan(
        mj.masks.varlen(lengths, causal=True), flags.cp, mj.PlanConfig(overlap=overlap)
    )
    print(plan.report())
    flags.out.mkdir(parents=True, exist_ok=True)
    plan.plot(flags.out / "profile_plan.png")
    print(f"picture of the plan and its predicted timeline: {flags.out / 'profile_plan.png'}")

    @jax.jit
    def step(q, kv, plan):
        def loss(q, kv):
            out = mj.dist_attention(q, kv, kv, plan)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(q, kv)

    rng, rows = np.random.default_rng(0), flags.cp * plan.spec.local_len
    q, kv = (
        rng.normal(size=(rows, heads, flags.head_dim)).astype(jnp.dtype(flags.dtype))
        for heads in (flags.heads, flags.kv_heads)
    )
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as temporary:
        arguments = jax.device_put((q, kv, plan), NamedSharding(mesh, P("cp")))
        compiled = step.lower(*arguments).compile()
        jax.block_until_ready(compiled(*arguments))
        folder = flags.trace or Path(temporary)
        with jax.profiler.trace(str(folder)):
            for _ in range(flags.steps):
                jax.block_until_ready(compiled(*arguments))
        traced = read_trace(folder, kinds_of_instructions(compiled))
    print(f"{'device':<16}{'attention':>12}{'communication':>15}{'of it hidden':>14}   a step")
    for device, intervals in sorted(traced.items()):
        attention, moves = union(intervals["attention"]), union(intervals["communication"])
        busy, moving = (
            float((x[:, 1] - x[:, 0]).sum()) / 1e6 / flags.steps for x in (attention, moves)
        )
        hidden = common(attention, moves) / 1e6 / flags.steps / moving if moving else 1.0
        print(f"{device:<16}{busy:>9.2f} ms{moving:>12.2f} ms{hidden:>14.0%}")


if __name__ == "__main__":
    main()
