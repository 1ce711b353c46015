"""Times the kernels on a GPU beside cuDNN (through ``jax.nn``), tokamax and a matrix product.

    python benchmarks/kernels.py [--lengths 1024 8192 32768] [--head-dims 128 64] [--backward] [--json FILE]

64 query heads, 8 kv heads, bfloat16. Documents are those of ``kernel_documents.json``. TFLOP/s are those of
the mask's area, 4 * area * N * H, and 2.5 times that backward. cuDNN gets the masks that it can express:
full, causal and a causal window.
The card throttles as it warms, so compare only figures of one run, best as ratios to cuDNN's.
"""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp

import magi_jax
from magi_jax import masks
from magi_jax.plan import slice_table

NUM_HEADS, NUM_KV_HEADS = 64, 8
WINDOW = 1024
FRAME = 2048  # tokens of a frame in block-causal documents
DOCUMENTS = json.loads(pathlib.Path(__file__).with_name("kernel_documents.json").read_text())
CUDNN_OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (WINDOW - 1, 0)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 32768, 65536]
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--backward", action="store_true", help="time the gradients alone")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    args = parser.parse_args()
    rows = []
    for head_dim in args.head_dims:
        for length in args.lengths:
            rows += measure(length, head_dim, args.backward)
            print_rows(rows[-len(cases(length)) :])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")


def cases(length: int) -> dict[str, masks.AttnMask]:
    """The masks of one length, by name."""
    lengths = DOCUMENTS["varlen"][str(length)]
    result = {
        "full": masks.full(length),
        "causal": masks.causal(length),
        "varlen_full": masks.varlen(lengths),
        "varlen_causal": masks.varlen(lengths, causal=True),
        "varlen_block_causal": masks.uniform_block_causal(lengths, FRAME),
        "window": masks.local(length, window=(WINDOW - 1, 0)),
    }
    if tiny := DOCUMENTS["tiny"].get(str(length)):
        result["tiny_varlen_full"] = masks.varlen(tiny)
        result["tiny_varlen_causal"] = masks.varlen(tiny, causal=True)
    return result


def measure(length: int, head_dim: int, backward: bool = False) -> list[dict]:
    """TFLOP/s of every implementation on every mask of one length."""
    q, k, v = operands(length, head_dim)
    ceiling = matmul_tflops()
    rows = []
    for name, mask in cases(length).items():
        table = jax.device_put(slice_table(mask))
        ours = jax.jit(functools.partial(magi_jax.flex_flash_attention, implementation=None))
        work = (10 if backward else 4) * mask.area * NUM_HEADS * head_dim
        row = {"mask": name, "length": length, "head_dim": head_dim, "matmul": ceiling}
        row["direction"] = "backward" if backward else "forward"
        timed = backward_seconds if backward else seconds
        row["ours"] = work / timed(ours, q, k, v, table) / 1e12
        for peer, call in peers(name).items():
            try:
                row[peer] = work / timed(call, q, k, v) / 1e12
            except Exception as error:  # a peer that refuses a case is reported, never hidden
                row[f"{peer}_error"] = str(error).splitlines()[0][:200]
        rows.append(row)
    return rows


def operands(length: int, head_dim: int) -> list[jax.Array]:
    """Normal q, k, v in bfloat16, ``[T, N, H]`` and ``[T, K, H]``."""
    keys = jax.random.split(jax.random.key(length), 3)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [
        jax.random.normal(key, (length, n, head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]


def peers(name: str) -> dict:
    """Jitted calls of other implementations that can express the mask."""
    if name not in CUDNN_OPTIONS:
        return {}
    options = CUDNN_OPTIONS[name]

    @jax.jit
    def cudnn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)

    result = {"cudnn": cudnn}
    try:
        import tokamax
    except ImportError:
        return result

    @jax.jit
    def tokamax_call(q, k, v):
        return tokamax.dot_product_attention(q[None], k[None], v[None], **options)[0]

    return {**result, "tokamax": tokamax_call}


def matmul_tflops(size: int = 8192) -> float:
    """Rate of a square bfloat16 product: the ceiling of the card as it is now."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / seconds(jax.jit(jnp.matmul), a, a) / 1e12


def seconds(call, *operands, budget_s: float = 0.15, repeats: int = 5) -> float:
    """Median over ``repeats`` of the mean time of back-to-back calls, warmed up, in seconds."""
    jax.block_until_ready([call(*operands) for _ in range(2)])
    start = time.perf_counter()
    jax.block_until_ready(call(*operands))
    once = time.perf_counter() - start
    count = max(1, int(budget_s / repeats / once))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        # Calls on one stream run in order, so that waiting for the last waits for all.
        for _ in range(count):
            result = call(*operands)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


def backward_seconds(call, q, k, v, *rest) -> float:
    """Median time of the gradients of q, k and v alone, from saved residuals."""
    out, pull = jax.vjp(lambda q, k, v: call(q, k, v, *rest), q, k, v)
    dout = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
    return seconds(jax.jit(lambda pull, dout: pull(dout)), pull, dout)


def print_rows(rows: list[dict]) -> None:
    for row in rows:
        figures = "  ".join(
            f"{name} {row[name]:5.0f}"
            for name in ("ours", "cudnn", "tokamax", "matmul")
            if name in row
        )
        ratio = f"  {row['ours'] / row['cudnn']:.2f} of cuDNN" if "cudnn" in row else ""
        label = f"{row['mask']}@{row['length']} h{row['head_dim']}"
        print(f"{label:32} {figures}{ratio}", flush=True)


def machine() -> dict:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit.stdout.strip(),
    }


if __name__ == "__main__":
    main()
