"""Times attention on the CPU beside XLA's and PyTorch's: forward and backward, masks of many areas.

    python benchmarks/cpu_kernels.py [--length 4096] [--repeats 3] [--json FILE]

All run in one process on the same inputs and take turns, so that a busy machine slows all alike; the best of
the repeats counts. Each gets its fastest legal form of a mask:

  xla         `jax.nn.dot_product_attention` with `is_causal`, or with a dense boolean mask made beforehand
  torch_sdpa  `scaled_dot_product_attention` with `is_causal`, one call for each document, or a dense mask
  torch_flex  FlexAttention, compiled, block mask made beforehand; its CPU kernel has no backward pass

GFLOP/s are those of the area of the mask: 4 * area * N * H forward, 2.5 times that backward.
"""

import argparse
import functools
import importlib.util
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from provenance import save

from magi_jax import masks
from magi_jax.ops import ffi, flex_flash_attention
from magi_jax.plan import slice_table

WINDOW = 256


class Case(NamedTuple):
    """A mask: its kind (full, causal, window) inside documents of ``lengths [D]``."""

    kind: str
    lengths: np.ndarray
    mask: masks.AttnMask


class Passes(NamedTuple):
    """Calls of one implementation that return when they are done; no backward where it has none."""

    forward: Callable
    backward: Callable | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--masks", nargs="+", help="names of masks; all by default")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="*", default=["xla", "torch_sdpa", "torch_flex"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="commit of a tree without git")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    args = parser.parse_args()
    rows = []
    for name, case in cases(args.length).items():
        if args.masks and name not in args.masks:
            continue
        for dtype in args.dtypes:
            for row in measure(case, dtype, args):
                rows.append({"mask": name, "dtype": dtype, **row})
                print_row(rows[-1])
    options = {key: getattr(args, key) for key in ("length", "heads", "head_dim", "repeats")}
    content = {**options, "kernels": ffi.build_info()["cpu_kernels"], "rows": rows}
    if args.json:
        save(args.json, args.commit, content)


def cases(length: int) -> dict[str, Case]:
    """Masks from the whole square down to a thin band; documents have random lengths, always the same."""

    def documents(count: int) -> np.ndarray:
        rng = np.random.default_rng(count)
        inner = rng.choice(np.arange(1, length), count - 1, replace=False)
        return np.diff(np.sort(np.concatenate([[0, length], inner])))

    whole = np.array([length])
    result = {
        "full": Case("full", whole, masks.full(length)),
        "causal": Case("causal", whole, masks.causal(length)),
        "window": Case("window", whole, masks.local(length, window=(WINDOW - 1, 0))),
    }
    for count in (4, 16, 64):
        lengths = documents(count)
        result[f"varlen_{count}"] = Case("full", lengths, masks.varlen(lengths))
        causal = masks.varlen(lengths, causal=True)
        result[f"varlen_causal_{count}"] = Case("causal", lengths, causal)
    return result


def measure(case: Case, dtype: str, args) -> list[dict]:
    """A row for each pass: milliseconds by implementation, and ratios to ours."""
    rng = np.random.default_rng(0)
    shape = (args.length, args.heads, args.head_dim)
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(4)]
    table = jax.tree.map(jnp.asarray, slice_table(case.mask))
    made = {"ours": jax_passes(lambda q, k, v: flex_flash_attention(q, k, v, table), arrays)}
    makers = {"xla": xla, "torch_sdpa": torch_sdpa, "torch_flex": torch_flex}
    for name in args.peers:
        if name == "xla" or importlib.util.find_spec("torch"):
            made[name] = makers[name](case, arrays)
    check(made, dtype)
    flops = 4 * case.mask.area * args.heads * args.head_dim
    rows = []
    for which, work in (("forward", flops), ("backward", 2.5 * flops)):
        calls = {name: getattr(passes, which) for name, passes in made.items()}
        calls = {name: call for name, call in calls.items() if call is not None}
        ms = best_ms(calls, args.repeats)
        rows.append(
            {
                "pass": which,
                "area": case.mask.area,
                "ms": {name: round(value, 2) for name, value in ms.items()},
                "ratio": {n: round(v / ms["ours"], 2) for n, v in ms.items() if n != "ours"},
                "gflops": round(work / ms["ours"] / 1e6, 1),
            }
        )
    return rows


def jax_passes(call: Callable, arrays: list[jax.Array]) -> Passes:
    """Passes of a JAX function of q, k and v."""
    q, k, v, dout = arrays
    forward = jax.jit(call)
    _, pull = jax.jit(lambda *x: jax.vjp(call, *x))(q, k, v)
    backward = jax.jit(lambda pull, dout: pull(dout))
    return Passes(
        lambda: jax.block_until_ready(forward(q, k, v)),
        lambda: jax.block_until_ready(backward(pull, dout)),
    )


def xla(case: Case, arrays: list[jax.Array]) -> Passes:
    """`jax.nn` on XLA's own operations."""
    call = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    if len(case.lengths) == 1 and case.kind in ("full", "causal"):
        return jax_passes(functools.partial(call, is_causal=case.kind == "causal"), arrays)
    dense = jnp.asarray(case.mask.dense())[None, None]
    return jax_passes(functools.partial(call, mask=dense), arrays)


def torch_sdpa(case: Case, arrays: list[jax.Array]) -> Passes:
    """PyTorch's fused CPU kernel."""
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    q, k, v, dout = _tensors(arrays)
    if case.kind == "window":
        dense = torch.tensor(case.mask.dense())

        def call(q, k, v):
            return attention(q, k, v, attn_mask=dense)
    else:
        sizes = case.lengths.tolist()

        def call(q, k, v):
            parts = zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True)
            return torch.cat([attention(*p, is_causal=case.kind == "causal") for p in parts], dim=2)

    return _torch_passes(call, (q, k, v), dout)


def torch_flex(case: Case, arrays: list[jax.Array]) -> Passes:
    """FlexAttention through PyTorch's compiler."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    document = torch.tensor(np.repeat(np.arange(len(case.lengths)), case.lengths))
    kind = case.kind

    def visible(b, h, q, k):
        same = document[q] == document[k]
        if kind == "full":
            return same
        return same & (k <= q) & (q - k < WINDOW) if kind == "window" else same & (k <= q)

    length = len(document)
    mask = create_block_mask(visible, None, None, length, length, device="cpu")
    q, k, v, _ = _tensors(arrays)
    compiled = torch.compile(flex_attention)

    def forward():
        with torch.no_grad():
            return compiled(q, k, v, block_mask=mask)

    return Passes(forward, None)


def _tensors(arrays: list[jax.Array]) -> list:
    """``[1, N, T, H]`` copies."""
    import torch

    return [torch.from_dlpack(x).clone().transpose(0, 1)[None].contiguous() for x in arrays]


def _torch_passes(call: Callable, operands: tuple, dout) -> Passes:
    import torch

    def forward():
        with torch.no_grad():
            return call(*operands)

    leaves = [x.detach().clone().requires_grad_() for x in operands]
    out = call(*leaves)
    return Passes(forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))


def check(made: dict[str, Passes], dtype: str) -> None:
    """Figures of wrong results are worth nothing."""
    tolerance = 1e-4 if dtype == "float32" else 1e-1
    for which in ("forward", "backward"):
        results = {
            name: _numpy(getattr(passes, which)())
            for name, passes in made.items()
            if getattr(passes, which) is not None
        }
        for name, result in results.items():
            for a, b in zip(results["ours"], result, strict=True):
                if not (error := np.abs(a - b).max()) < tolerance:
                    raise SystemExit(f"{which} of {name} differs from ours by {error}")


def _numpy(result) -> list[np.ndarray]:
    """Results of any library as ``[T, N, H]`` float32."""
    parts = result if isinstance(result, tuple) else (result,)
    if isinstance(parts[0], jax.Array):
        return [np.asarray(part, np.float32) for part in parts]
    return [part.detach().float().numpy()[0].swapaxes(0, 1) for part in parts]


def best_ms(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Best time of each call, all taking turns."""
    best = dict.fromkeys(calls, np.inf)
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def print_row(row: dict) -> None:
    figures = "  ".join(f"{name} {ms:8.1f}" for name, ms in row["ms"].items())
    ratios = "  ".join(f"{ratio:5.1f} x {name}" for name, ratio in row["ratio"].items())
    label = f"{row['mask']:17} {row['dtype']:9} {row['pass']:9}"
    print(f"{label} {figures} ms | {ratios} | {row['gflops']:.0f} GFLOP/s", flush=True)


if __name__ == "__main__":
    main()
