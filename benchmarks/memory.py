"""Peak memory of a training step against the length of the sequence, with and without rematerialisation.

    python benchmarks/memory.py [--limit-gib 130] [--layers 4] [--json FILE]

The step is loss and gradients of a stack of layers (attention and a feed-forward block, scanned) over one
causal sequence on one device. Peaks are those of XLA's own analysis of the compiled program: arguments,
results and temporaries. Lengths double until a step no longer fits. On a GPU the longest of ours that fits
and is quick enough is run, and what its allocator saw is reported beside the analysis; matrix products are
not tuned there, which changes their time alone. Policies of `jax.checkpoint`:

  none      every intermediate value is kept
  context   a layer keeps its input, and `out` and `lse` of its attention, which then runs forward once
  full      a layer keeps its input alone
"""

import argparse
import functools
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from provenance import save

import magi_jax
from magi_jax import masks
from magi_jax.ops import CONTEXT_NAME
from magi_jax.plan import slice_table

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit-gib", type=float, default=130.0)
    parser.add_argument("--first", type=int, default=8192)
    parser.add_argument("--last", type=int, default=2**21)
    parser.add_argument("--longest-run", type=int, default=2**17, help="tokens of steps to run")
    parser.add_argument("--jobs", type=int, default=1, help="programs to compile at a time")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="query and kv heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--policies", nargs="+", default=["none", "context", "full"])
    parser.add_argument("--attentions", nargs="+", default=["ours", "xla", "cudnn"])
    parser.add_argument("--commit", help="commit of a tree without git")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    args.dtype = jnp.bfloat16 if on_gpu else jnp.float32  # a CPU would copy bfloat16 to float32
    sweeps = [
        (attention, policy)
        for attention in args.attentions
        for policy in (args.policies if attention == "ours" else ["full"])
        if attention != "cudnn" or on_gpu
    ]
    rows, runs = [], []
    with ThreadPoolExecutor(args.jobs) as pool, ThreadPoolExecutor(len(sweeps)) as sweepers:
        found = sweepers.map(lambda way: sweep(*way, args, pool), sweeps)
        for (attention, _), (new, last) in zip(sweeps, found, strict=True):
            rows += new
            if last is not None and attention == "ours" and on_gpu:
                runs.append(last)
    content = {
        "layers": args.layers, "heads": args.heads, "head_dim": args.head_dim,
        "dtype": jnp.dtype(args.dtype).name, "limit_gib": args.limit_gib, "rows": rows,
    }  # fmt: skip
    if args.json:
        save(args.json, args.commit, content)
    # From the least on: the allocator tells its peak since the process began.
    for compiled, shapes, row in sorted(runs, key=lambda found: found[2]["gib"]):
        row["allocator_gib"] = run(compiled, shapes)
        print(
            f"{row['policy']} {row['length']}: allocator {row['allocator_gib']:.2f} GiB", flush=True
        )
        if args.json:
            save(args.json, args.commit, content)


def sweep(attention: str, policy: str, args, pool: ThreadPoolExecutor) -> tuple[list[dict], Any]:
    """Peaks of rising lengths, the first that does not fit included; and the longest that is to be run."""
    rows, last, length = [], None, args.first
    while length <= args.last:
        # As many lengths at a time as there are threads; what lies past the first misfit is left out.
        lengths = [length << i for i in range(args.jobs) if length << i <= args.last]
        futures = [pool.submit(compile_step, attention, policy, n, args) for n in lengths]
        for length, future in zip(lengths, futures, strict=True):
            try:
                compiled, shapes = future.result()
            except Exception as problem:  # some refuse lengths; that is a result
                message = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
                rows.append(
                    {"attention": attention, "policy": policy, "length": length, "error": message}
                )
                print(f"{attention:6} {policy:8} {length:8} {message}", flush=True)
                return rows, last
            peak = peak_gib(compiled)
            row = {"attention": attention, "policy": policy, "length": length, "gib": peak}
            rows.append(row)
            print(f"{attention:6} {policy:8} {length:8} {peak:9.2f} GiB", flush=True)
            if peak > args.limit_gib:
                return rows, last
            if length <= args.longest_run:
                last = compiled, shapes, row
        length *= 2
    return rows, last


def peak_gib(compiled) -> float:
    """Arguments, results and temporaries of a program, by XLA's analysis."""
    found = compiled.memory_analysis()
    peak = found.argument_size_in_bytes + found.output_size_in_bytes
    return (peak + found.temp_size_in_bytes - found.alias_size_in_bytes) / GIB


def run(compiled, shapes) -> float:
    """Runs a step; the most that the allocator has held so far, in GiB."""
    values = jax.tree.map(
        lambda x: jnp.full(x.shape, 0.01, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.asarray(x),
        shapes,
    )  # fmt: skip
    jax.block_until_ready(compiled(*values))
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"] / GIB


def compile_step(attention: str, policy: str, length: int, args):
    """The compiled step and its arguments: shapes, and the table of the mask."""
    heads, kv_heads = args.heads
    width = heads * args.head_dim
    shapes = {
        "q": (width, heads, args.head_dim),
        "kv": (width, 2, kv_heads, args.head_dim),
        "out": (heads, args.head_dim, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    weights = {
        name: jax.ShapeDtypeStruct((args.layers, *shape), args.dtype)
        for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((length, width), args.dtype)
    table = slice_table(masks.causal(length)) if attention == "ours" else None
    step = jax.jit(functools.partial(loss_and_gradients, attention=attention, policy=policy))
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    return step.lower(weights, x, table).compile(options), (weights, x, table)


def loss_and_gradients(weights: dict, x: jax.Array, table, *, attention: str, policy: str):
    """Loss of the stack and its gradients by the weights."""

    def layer(x, weights):
        y = normalised(x)
        q = jnp.einsum("td,dnh->tnh", y, weights["q"])
        k, v = jnp.einsum("td,dckh->ctkh", y, weights["kv"])
        context = attend(q, k, v, table, attention)
        x = x + jnp.einsum("tnh,nhd->td", context, weights["out"])
        return x + jax.nn.gelu(normalised(x) @ weights["up"]) @ weights["down"], None

    saved = {
        "none": None,
        "context": jax.checkpoint_policies.save_only_these_names(CONTEXT_NAME),
        "full": jax.checkpoint_policies.nothing_saveable,
    }[policy]
    if saved is not None:
        layer = jax.checkpoint(layer, policy=saved)

    def loss(weights):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(weights)


def normalised(x: jax.Array) -> jax.Array:
    """Rows of unit root mean square."""
    scale = jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + 1e-6)
    return x * scale.astype(x.dtype)


def attend(q, k, v, table, attention: str) -> jax.Array:
    """Causal attention of one sequence."""
    if attention == "ours":
        return magi_jax.flex_flash_attention(q, k, v, table)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)


if __name__ == "__main__":
    main()
