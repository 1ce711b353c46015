"""Peak memory of a training step against the length of the sequence, with and without rematerialisation.

    python benchmarks/memory.py [--limit-gib 130] [--layers 4] [--json FILE]

The step is loss and gradients of a stack of layers (attention and a feed-forward block, scanned) over one
causal sequence on one device. Peaks are those of XLA's own analysis of the compiled program: arguments,
results and temporaries. Lengths double until a step no longer fits; on a GPU the longest that fits and is
quick enough is run, and what its allocator saw is reported beside the analysis. Policies of `jax.checkpoint`:

  none      every intermediate value is kept
  context   a layer keeps its input, and `out` and `lse` of its attention, which then runs forward once
  full      a layer keeps its input alone
"""

import argparse
import functools
import pathlib

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
    rows = []
    for attention in args.attentions:
        if attention == "cudnn" and not on_gpu:
            continue
        for policy in args.policies if attention == "ours" else ["full"]:
            rows += sweep(attention, policy, args, run_last=on_gpu)
    content = {
        "layers": args.layers, "heads": args.heads, "head_dim": args.head_dim,
        "dtype": jnp.dtype(args.dtype).name, "limit_gib": args.limit_gib, "rows": rows,
    }  # fmt: skip
    if args.json:
        save(args.json, args.commit, content)


def sweep(attention: str, policy: str, args, run_last: bool) -> list[dict]:
    """Peaks of rising lengths, the first that does not fit included."""
    rows, last = [], None
    length = args.first
    while length <= args.last:
        compiled, shapes = compile_step(attention, policy, length, args)
        found = compiled.memory_analysis()
        peak = found.argument_size_in_bytes + found.output_size_in_bytes
        peak += found.temp_size_in_bytes - found.alias_size_in_bytes
        row = {"attention": attention, "policy": policy, "length": length, "gib": peak / GIB}
        rows.append(row)
        print(f"{attention:6} {policy:8} {length:8} {peak / GIB:9.2f} GiB", flush=True)
        if peak > args.limit_gib * GIB:
            break
        if length <= args.longest_run:
            last = compiled, shapes, row
        length *= 2
    if run_last and last is not None:
        compiled, shapes, row = last
        values = jax.tree.map(
            lambda x: jnp.full(x.shape, 0.01, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating)
            else jnp.asarray(x),
            shapes,
        )  # fmt: skip
        jax.block_until_ready(compiled(*values))
        row["allocator_gib"] = jax.devices()[0].memory_stats()["peak_bytes_in_use"] / GIB
        print(f"{attention:6} {policy:8} ran; allocator saw {row['allocator_gib']:.2f} GiB so far")
    return rows


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
    return step.lower(weights, x, table).compile(), (weights, x, table)


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
