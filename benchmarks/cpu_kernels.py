"""Times attention on the CPU against XLA's: forward and backward, causal and packed documents.

    python benchmarks/cpu_kernels.py [--length 4096] [--repeats 5] [--json FILE]

Both run in one process on the same inputs and take turns, so that a busy machine slows both; the best of the
repeats counts. XLA gets its fastest legal form of each mask: `is_causal`, or a dense boolean mask that is
made beforehand. GFLOP/s are those of the mask's area: 4 * area * N * H forward, 2.5 times that backward.
"""

import argparse
import datetime
import json
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax import masks
from magi_jax.ops import ffi, flex_flash_attention
from magi_jax.plan import slice_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    args = parser.parse_args()

    print(
        f"{'mask':14} {'dtype':9} {'pass':9} {'ours ms':>9} {'XLA ms':>9} {'ratio':>6} {'GFLOP/s':>8}"
    )
    rows = []
    for name, mask in cases(args).items():
        for dtype in args.dtypes:
            for row in measure(name, mask, dtype, args):
                rows.append(row)
                print(
                    f"{row['mask']:14} {row['dtype']:9} {row['pass']:9} {row['ours_ms']:9.1f}"
                    f" {row['xla_ms']:9.1f} {row['ratio']:6.1f} {row['gflops']:8.1f}",
                    flush=True,
                )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**machine(args), "rows": rows}, indent=2) + "\n")


def cases(args) -> dict[str, masks.AttnMask]:
    """Causal, and documents of random lengths, the same for every run."""
    rng = np.random.default_rng(args.documents)
    inner = rng.choice(np.arange(1, args.length), args.documents - 1, replace=False)
    lengths = np.diff(np.sort(np.concatenate([[0, args.length], inner])))
    return {
        "causal": masks.causal(args.length),
        "varlen": masks.varlen(lengths),
        "varlen_causal": masks.varlen(lengths, causal=True),
    }


def measure(name, mask, dtype, args) -> list[dict]:
    rng = np.random.default_rng(0)
    shape = (args.length, args.heads, args.head_dim)
    q, k, v, dout = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(4))
    table = jax.tree.map(jnp.asarray, slice_table(mask))
    dense = None if name == "causal" else jnp.asarray(mask.dense())

    def ours(q, k, v):
        return flex_flash_attention(q, k, v, table)

    def xla(q, k, v):
        if dense is None:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jax.nn.dot_product_attention(q, k, v, mask=dense[None, None])

    pulls = [jax.jit(lambda *x, fn=fn: jax.vjp(fn, *x)) for fn in (ours, xla)]
    pulled = [pull(q, k, v)[1] for pull in pulls]
    backward = jax.jit(lambda pull, dout: pull(dout))
    check(ours, xla, (q, k, v), [backward(pull, dout) for pull in pulled], dtype)
    flops = 4 * mask.area * args.heads * args.head_dim
    forwards = [jax.jit(fn) for fn in (ours, xla)]
    passes = {
        "forward": ([lambda f=forward: f(q, k, v) for forward in forwards], flops),
        "backward": ([lambda p=pull: backward(p, dout) for pull in pulled], 2.5 * flops),
    }
    rows = []
    for which, (calls, work) in passes.items():
        ours_ms, xla_ms = best_ms(calls, args.repeats)
        rows.append(
            {
                "mask": name,
                "dtype": dtype,
                "pass": which,
                "area": mask.area,
                "ours_ms": round(ours_ms, 2),
                "xla_ms": round(xla_ms, 2),
                "ratio": round(xla_ms / ours_ms, 2),
                "gflops": round(work / ours_ms / 1e6, 1),
            }
        )
    return rows


def check(ours, xla, operands, gradients, dtype) -> None:
    """Figures of wrong results are worth nothing."""
    tolerance = 1e-4 if dtype == "float32" else 1e-1
    results = (jax.jit(ours)(*operands), jax.jit(xla)(*operands))
    for a, b in ((results[0], results[1]), *zip(*gradients, strict=True)):
        error = float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max())
        if not error < tolerance:
            raise SystemExit(f"results differ by {error}")


def best_ms(calls, repeats: int) -> list[float]:
    for call in calls:
        jax.block_until_ready(call())
    best = [np.inf] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def machine(args) -> dict:
    info = pathlib.Path("/proc/cpuinfo")
    models = (
        [x for x in info.read_text().splitlines() if "model name" in x] if info.exists() else []
    )
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": models[0].split(":")[1].strip() if models else platform.processor(),
        "cores": len(models),
        "jax": jax.__version__,
        "kernels": ffi.build_info()["cpu_kernels"],
        "options": {k: str(v) if k == "json" else v for k, v in vars(args).items()},
    }


if __name__ == "__main__":
    main()
