"""Two hundred packings of real documents through one compiled step: compilations, planning and step times.

    python benchmarks/recompilation.py [--packings 200] [--seq-len 4096] [--json FILE]

Documents are functions and classes of the Python standard library as bytes, packed as training would; each
packing has a causal mask of its own. Ways to give it to a step of forward and backward attention:

  argument     tables as arguments of one program, padded to sizes that another seed's packings asked for
  distributed  the same with a plan over all devices, made for each packing
  constant     the mask closed over, as a library does whose masks are static (fewer packings: each compiles)
  cudnn        document lengths as arguments of cuDNN's packed layout, on a GPU
  flex         PyTorch's FlexAttention with a block mask for each packing; on a CPU forward alone
"""

import argparse
import functools
import importlib.util
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from kernel_peers import MOST_CUDNN_GIB, cudnn_gib
from provenance import ROOT, save

import magi_jax
from magi_jax import data, masks
from magi_jax.plan import PlanConfig, make_plan, slice_table

sys.path.insert(0, str(ROOT / "examples"))
import corpus

SAMPLE, MARGIN = 64, 3.0  # packings of another seed that sizes are taken from, and room above them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packings", type=int, default=200)
    parser.add_argument("--constants", type=int, default=20, help="packings that are compiled each")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--heads", type=int, nargs=2, default=[4, 2], help="query and kv heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", default=list(ways()), choices=list(ways()))
    parser.add_argument("--commit", help="commit of a tree without git")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    args = parser.parse_args()
    if min(args.packings, args.constants) < 2:
        parser.error("at least 2 packings and constants: the first step compiles")
    packings = list(itertools.islice(stream(args.seq_len, args.seed), args.packings))
    documents = [int(ids.max()) for ids in packings]
    content = {
        "seq_len": args.seq_len, "packings": args.packings, "heads": args.heads,
        "head_dim": args.head_dim, "dtype": args.dtype, "devices": len(jax.devices()),
        "platform": jax.default_backend(),
        "documents": [min(documents), float(np.median(documents)), max(documents)],
        "ways": {},
    }  # fmt: skip
    for name in args.ways:
        content["ways"][name] = ways()[name](packings, args)
        print(name, content["ways"][name], flush=True)
        if args.json:
            save(args.json, args.commit, content)


def ways() -> dict[str, Callable]:
    """The ways by name."""
    return {
        "argument": argument,
        "distributed": distributed,
        "constant": constant,
        "cudnn": cudnn,
        "flex": flex,
    }


def stream(seq_len: int, seed: int) -> Iterator[np.ndarray]:
    """Segment ids of one packing after another, ``[seq_len]``, 0 = padding."""
    files = corpus.documents(corpus.source_files(), seed)
    blocks = itertools.chain.from_iterable(map(top_level_blocks, files))
    for packed in data.pack(blocks, seq_len, window=2048, seed=seed):
        yield packed.segment_ids


def top_level_blocks(source: np.ndarray) -> list[np.ndarray]:
    """A source file cut where two blank lines stand: functions and classes, short ones and long ones."""
    newline = source == ord("\n")
    cuts = np.flatnonzero(newline[:-2] & newline[1:-1] & newline[2:]) + 3
    return [block for block in np.split(source, cuts) if len(block)]


def mask_of(segment_ids: np.ndarray) -> masks.AttnMask:
    """Causal inside documents."""
    return masks.from_segment_ids(segment_ids, causal=True)


def operands(args, rows: int | None = None) -> list[jax.Array]:
    """q, k, v and dout, normal."""
    heads = (args.heads[0], args.heads[1], args.heads[1], args.heads[0])
    keys = jax.random.split(jax.random.key(0), 4)
    shape = rows or args.seq_len
    return [
        jax.random.normal(key, (shape, n, args.head_dim), args.dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def step_of(attend: Callable, traced: list) -> Callable:
    """A jitted ``(q, k, v, dout, mask) -> (out, dq, dk, dv)``; ``traced`` grows with each compilation."""

    @jax.jit
    def step(q, k, v, dout, mask):
        traced.append(None)
        out, pull = jax.vjp(lambda *x: attend(*x, mask), q, k, v)
        return out, *pull(dout)

    return step


def run(packings: list, prepare: Callable, step: Callable, wait: Callable) -> dict:
    """Times of preparing and of running each packing; the first step, which compiles, is apart."""
    prepared_ms, processor_ms, step_ms = [], [], []
    for ids in packings:
        start, thread_start = time.perf_counter(), time.thread_time()
        given = prepare(ids)
        prepared_ms.append(1e3 * (time.perf_counter() - start))
        processor_ms.append(1e3 * (time.thread_time() - thread_start))
        start = time.perf_counter()
        wait(step(given))
        step_ms.append(1e3 * (time.perf_counter() - start))
    return {
        "packings": len(packings),
        "first_step_ms": step_ms[0],
        "planning_ms": spread(prepared_ms[1:]),
        "planning_processor_ms": spread(processor_ms[1:]),
        "step_ms": spread(step_ms[1:]),
        "all_steps_s": sum(step_ms) / 1e3,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Percentiles of times."""
    names = {"p5": 5, "median": 50, "p95": 95, "max": 100}
    return {name: round(float(np.percentile(values, at)), 3) for name, at in names.items()}


def argument(packings: list, args) -> dict:
    """One device, tables as arguments."""
    sample = itertools.islice(stream(args.seq_len, args.seed + 1), SAMPLE)
    first, *others = (slice_table(mask_of(ids)).spec for ids in sample)
    found = first.union(*others).scaled(MARGIN)
    traced: list = []
    step = step_of(magi_jax.flex_flash_attention, traced)
    x, outgrown = operands(args), 0

    def prepare(ids):
        nonlocal found, outgrown
        mask = mask_of(ids)
        try:
            return slice_table(mask, spec=found)
        except ValueError:  # a packing with more documents than any of the sample
            outgrown += 1
            found = found.union(slice_table(mask).spec.scaled(MARGIN))
            return slice_table(mask, spec=found)

    result = run(packings, prepare, lambda table: step(*x, table), jax.block_until_ready)
    return {"compiles": len(traced), "outgrown": outgrown, **result}


def distributed(packings: list, args) -> dict:
    """All devices, a plan for each packing as an argument."""
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    config = PlanConfig(seq_len=args.seq_len, overlap=1)
    sample = itertools.islice(stream(args.seq_len, args.seed + 1), SAMPLE)
    specs = [make_plan(mask_of(ids), devices, config).spec for ids in sample]
    found = specs[0].union(*specs[1:]).scaled(MARGIN)
    traced: list = []
    step = step_of(functools.partial(magi_jax.dist_attention, mesh=mesh), traced)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("cp"))
    x = jax.device_put(operands(args, devices * found.local_len), rows)
    outgrown = 0

    def prepare(ids):
        nonlocal found, outgrown
        try:
            plan = make_plan(mask_of(ids), devices, config, spec=found)
        except ValueError:
            outgrown += 1
            found = found.union(make_plan(mask_of(ids), devices, config).spec.scaled(MARGIN))
            plan = make_plan(mask_of(ids), devices, config, spec=found)
        return jax.device_put(plan, rows)

    result = run(packings, prepare, lambda plan: step(*x, plan), jax.block_until_ready)
    return {"compiles": len(traced), "outgrown": outgrown, "devices": devices, **result}


def constant(packings: list, args) -> dict:
    """One device, the mask part of the program."""
    traced: list = []
    x = operands(args)

    def prepare(ids):
        return step_of(functools.partial(_attend_constant, table=slice_table(mask_of(ids))), traced)

    chosen = packings[: args.constants]
    result = run(chosen, prepare, lambda step: step(*x, None), jax.block_until_ready)
    return {"compiles": len(traced), **result}


def _attend_constant(q, k, v, _, table):
    return magi_jax.flex_flash_attention(q, k, v, table)


def cudnn(packings: list, args) -> dict:
    """Lengths as arguments, with room for as many documents as any packing has; padding is one more."""
    if jax.default_backend() != "gpu":
        return {"missing": "cuDNN needs a GPU"}
    from jax._src.cudnn import fused_attention_stablehlo as fused

    most = max(int(ids.max()) for ids in packings) + 1
    if (gib := cudnn_gib(most, args.seq_len, args.heads[0])) > MOST_CUDNN_GIB:
        return {"missing": f"room for {most} documents takes {gib:.0f} GiB"}
    scale = args.head_dim**-0.5

    def attend(q, k, v, lengths):
        ends = jnp.cumsum(lengths)
        offsets = jnp.where(jnp.arange(most + 1) <= jnp.count_nonzero(lengths),
                            jnp.append(0, ends), -1).astype(jnp.int32)[None]  # fmt: skip
        return fused.dot_product_attention(
            q[None], k[None], v[None], None, None, lengths[None], lengths[None], offsets, offsets,
            scale=scale, mask_type=fused.MaskType.PADDING_CAUSAL,
        )[0]  # fmt: skip

    traced: list = []
    step, x = step_of(attend, traced), operands(args)

    def prepare(ids):
        return packed_lengths(ids, most)

    result = run(packings, prepare, lambda lengths: step(*x, lengths), jax.block_until_ready)
    return {"compiles": len(traced), "most_documents": most, **result}


def packed_lengths(segment_ids: np.ndarray, most: int) -> np.ndarray:
    """Lengths of documents, then of the padding behind them, then zeros, ``[most]``."""
    padding, *documents = np.bincount(segment_ids)
    lengths = [length for length in (*documents, padding) if length]
    return np.pad(lengths, (0, most - len(lengths))).astype(np.int32)


def flex(packings: list, args) -> dict:
    """A block mask for each packing, its document ids a tensor that the mask function reads."""
    if importlib.util.find_spec("torch") is None:
        return {"missing": "PyTorch is not installed"}
    import torch
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    counters.clear()
    x = [torch.randn(1, n, args.seq_len, args.head_dim, device=device,
                     dtype=getattr(torch, args.dtype)) for n in (*args.heads, args.heads[1])]  # fmt: skip
    dout = torch.randn_like(x[0])
    if device == "cuda":  # the CPU kernel has no backward
        x = [tensor.requires_grad_() for tensor in x]
    compiled = torch.compile(flex_attention)

    def prepare(ids):
        document = torch.tensor(ids, device=device)

        def visible(b, h, q, k):
            return (document[q] == document[k]) & (k <= q)

        length = args.seq_len
        return create_block_mask(visible, None, None, length, length, device=device)

    def step(mask):
        out = compiled(*x, block_mask=mask, enable_gqa=True)
        return torch.autograd.grad(out, x, dout) if device == "cuda" else out

    def wait(_):
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.set_grad_enabled(device == "cuda"):
        result = run(packings, prepare, step, wait)
    passes = "forward and backward" if device == "cuda" else "forward"
    return {"compiles": int(counters["stats"]["unique_graphs"]), "passes": passes, **result}


if __name__ == "__main__":
    main()
