"""Times distributed attention per GPU beside one GPU that computes the whole sequence.

    python benchmarks/distributed.py [--cp 2] [--tokens 32768] [--heads 64:8 64:64] [--json FILE]

Masks and documents are those of ``kernel_documents.json`` (repeated for longer sequences), bfloat16,
head dim 128, ``--tokens`` per GPU. TFLOP/s per GPU are those of the mask's area over the number of
GPUs, 4 * area * N * H forward, 2.5 times that for the gradients alone. `ratio` is to the rate of one
GPU on the same sequence; `imbalance` of the plan bounds it. With --busy that is the rate of the
slowest GPU while each of them computes the whole sequence for itself: cards differ, and share a
cooler and a power supply. Cards change their pace, so whatever is compared takes short turns on
cards that never rest; `ratio` is the mean over turns, each beside the single GPUs' turns before and
after it, and `ratio_error` its standard error. With --single-tokens a single GPU computes a sequence
of so many tokens at most, and `ratio` is that of the rates: the whole of eight GPUs takes one of them
seconds. With several processes, start one per GPU and add --coordinator HOST:PORT --processes N
--process I; then the single GPUs are each process's own, all at once.
"""

import argparse
import contextlib
import functools
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import add_process_flags, place, save_ranks, start
from turns import Times, in_turns, means, ratio, run

import magi_jax
from magi_jax import dist_attention, masks
from magi_jax.comm import attention_staging_bytes, symmetric_memory
from magi_jax.parallel import DistOptions
from magi_jax.plan import AttentionPlan, PlanConfig, make_plan, slice_table
from magi_jax.solver.cost.model import CostModel

HEAD_DIM = 128
WINDOW, FRAME = 1024, 2048
RANK = 32768
TRACED_S = 0.3  # of calls in a row in a profile
DOCUMENTS = json.loads(pathlib.Path(__file__).with_name("kernel_documents.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768, help="per GPU")
    parser.add_argument("--heads", nargs="+", default=["64:8"], help="query heads:kv heads")
    parser.add_argument("--masks", nargs="+", help="names of masks, in order; all by default")
    parser.add_argument("--transports", nargs="+", default=["native", "portable"])
    parser.add_argument("--overlap", default="auto", help="remote stages, or late")
    parser.add_argument("--effort", default="fast", choices=["fast", "high"], help="of planning")
    parser.add_argument("--blocks", type=int, default=8, help="of a kernel that moves rows")
    parser.add_argument("--reduce-dtype", help="in which gradients of keys travel; float32")
    parser.add_argument("--no-single", action="store_true", help="skip the single GPU")
    parser.add_argument("--busy", action="store_true", help="single GPUs compute all at once")
    parser.add_argument("--single-tokens", type=int, help="at most, of what a single GPU computes")
    parser.add_argument("--trace", type=pathlib.Path, help="folder for a profile of every case")
    add_process_flags(parser)
    args = parser.parse_args()
    mesh = start(args)
    args.overlap = args.overlap if args.overlap in ("auto", "late") else int(args.overlap)
    rows = []
    for heads in args.heads:
        num_heads, num_kv_heads = map(int, heads.split(":"))
        named = cases(args.tokens * mesh.size)
        for name in args.masks or named:
            rows += measure(mesh, name, named[name], num_heads, num_kv_heads, args)
            save_ranks(args, mesh, rows)


def cases(length: int) -> dict[str, masks.AttnMask]:
    """The masks of one length, by name."""
    lengths, tiny = documents("varlen", length), documents("tiny", length)
    return {
        "full": masks.full(length),
        "causal": masks.causal(length),
        "window": masks.local(length, window=(WINDOW - 1, 0)),
        # Documents that fit a rank: nothing crosses, so that this shows what cutting alone costs.
        "window_apart": masks.varlen(
            [RANK] * (length // RANK), causal=True, window=(WINDOW - 1, 0)
        ),
        "varlen_full": masks.varlen(lengths),
        "varlen_causal": masks.varlen(lengths, causal=True),
        "varlen_block_causal": masks.uniform_block_causal(lengths, FRAME),
        "tiny_varlen_full": masks.varlen(tiny),
        "tiny_varlen_causal": masks.varlen(tiny, causal=True),
    }


def documents(kind: str, length: int) -> np.ndarray:
    """Lengths that fill a sequence: those listed for it, or the longest list again and again."""
    listed = DOCUMENTS[kind].get(str(length))
    if listed is not None:
        return np.array(listed)
    longest = DOCUMENTS[kind][max(DOCUMENTS[kind], key=int)]
    ends = np.cumsum(np.tile(longest, -(-length // sum(longest))))
    ends = np.append(ends[ends < length], length)
    return np.diff(ends, prepend=0)


def measure(mesh, name, mask, num_heads, num_kv_heads, args) -> list[dict]:
    """Rows of one mask: one GPU, then every transport."""
    cp_size = mesh.size
    heads = num_heads, num_kv_heads
    plan = plan_of(mask, cp_size, heads, overlap=args.overlap, effort=args.effort)
    label = {"mask": name, "heads": f"{num_heads}:{num_kv_heads}", "tokens": args.tokens}
    label |= {"reduce_dtype": args.reduce_dtype} if args.reduce_dtype else {}
    label |= described(plan)
    alone_mask = mask_alone(mask, name, args.single_tokens)
    flops = {"alone": 4 * alone_mask.area * num_heads * HEAD_DIM}
    flops["each"] = 4 * mask.area * num_heads * HEAD_DIM / cp_size
    tensors = operands(mesh, cp_size * plan.spec.local_len, num_heads, num_kv_heads)
    placed = place(plan, NamedSharding(mesh, P("cp")))
    calls, checks, single = {}, [], None
    with contextlib.ExitStack() as stack:
        if not args.no_single:
            single = "each GPU" if args.busy or args.coordinator else "one GPU"
            one_only = single == "one GPU"
            calls[single] = single_gpus(mesh, alone_mask, num_heads, num_kv_heads, one_only)
        for transport in args.transports:
            which, check = stack.enter_context(chosen(transport, mesh, plan, heads, args))
            checks.append(check)
            calls[transport] = our_passes(tensors, placed, mesh, which, args.reduce_dtype)
        times = in_turns(calls)
        for transport in args.transports if args.trace else ():
            trace(args.trace / f"{name}_{num_kv_heads}_{transport}", calls[transport])
        for check in checks:
            check()
    label["single_tokens"] = alone_mask.q_len
    return rows_of(times, single, label, flops)


def mask_alone(mask, name: str, tokens: int | None):
    """What a single GPU computes: the mask itself, or that of a sequence of so many tokens."""
    return mask if tokens is None or tokens >= mask.q_len else cases(tokens)[name]


def rows_of(times: Times, single: str | None, label: dict, flops: dict[str, float]) -> list[dict]:
    """A row for each of what was timed; ``flops`` are those of a GPU alone and of each of all."""
    rows = []
    share = flops["each"] / flops["alone"]
    for which, seconds in means(times).items():
        alone = which == single
        beside = None
        if single and not alone:
            beside = {
                name: [x * share for x in ratio(times[single][name], turns)]
                for name, turns in times[which].items()
            }
        work = flops["alone" if alone else "each"]
        rows.append(row(label | {"transport": which}, seconds, work, beside))
    return rows


def plan_of(mask, cp_size: int, heads: tuple[int, int], **options) -> AttentionPlan:
    """The plan that is timed; ``options`` are those of `PlanConfig`."""
    model = CostModel(num_heads=heads[0], num_kv_heads=heads[1], head_dim=HEAD_DIM)
    return make_plan(mask, cp_size, PlanConfig(roll_shifts=(), cost_model=model, **options))


def described(plan: AttentionPlan) -> dict:
    """What a figure says of its plan; late queries and rows are those of the rank that has most."""
    report = plan.report()
    return {
        "imbalance": float(report.imbalance),
        "remote_stages": plan.spec.num_remote_stages,
        "backward_stages": len(plan.backward_stages.comm),
        "late_rows": 0 if plan.late is None else int(plan.late.num_rows.max()),
        "remote_rows": int(max(report.recv_rows)),
    }


def single_gpus(
    mesh: Mesh, mask, num_heads: int, num_kv_heads: int, first_only: bool
) -> dict[str, Callable]:
    """Both passes on one GPU that has a whole sequence, or on all of this process at once, one each."""
    devices = mesh.local_devices[: 1 if first_only else None]
    apart = Mesh(np.array(devices), ("cp",), axis_types=(AxisType.Auto,))
    tensors = operands(apart, len(devices) * mask.q_len, num_heads, num_kv_heads)
    table = place(slice_table(mask), NamedSharding(apart, P()))
    # One program for all of them, in which nothing crosses: it is compiled and started once.
    attention = jax.shard_map(
        functools.partial(magi_jax.flex_flash_attention, implementation=None),
        mesh=apart,
        in_specs=(P("cp"), P("cp"), P("cp"), P()),
        out_specs=P("cp"),
    )
    return passes(attention, tensors, table)


def our_passes(tensors, plan, mesh, transport, reduce_dtype=None) -> dict[str, Callable]:
    """`passes` of `dist_attention`; ``plan`` is sharded already."""
    options = DistOptions(transport=transport, reduce_dtype=reduce_dtype)

    def call(q, k, v, plan):
        return dist_attention(q, k, v, plan, mesh=mesh, options=options)

    return passes(call, tensors, plan)


class chosen:  # noqa: N801, a context manager
    """A transport by name, and what checks it."""

    def __init__(self, name, mesh, plan, heads, args):
        self.memory = None
        num_heads, num_kv_heads = heads
        if name != "portable":
            room = {}
            if name == "staged" or args.coordinator:
                size = attention_staging_bytes(
                    plan.spec, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM
                )
                room = {"placement": "staged", "staging_bytes": size}
            self.memory = symmetric_memory(mesh, "cp", num_blocks=args.blocks, **room)

    def __enter__(self):
        if self.memory is None:
            return None, lambda: None
        return self.memory.transport, self.memory.check

    def __exit__(self, *_):
        if self.memory is not None:
            self.memory.close()


def operands(mesh: Mesh, rows: int, num_heads: int, num_kv_heads: int) -> list[jax.Array]:
    """Normal q, k, v and dout."""
    return _maker(NamedSharding(mesh, P("cp")), rows, num_heads, num_kv_heads)()


@functools.cache
def _maker(place: NamedSharding, rows: int, num_heads: int, num_kv_heads: int) -> Callable:
    @functools.partial(jax.jit, out_shardings=place)
    def make():
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
        return [
            jax.random.normal(key, (rows, n, HEAD_DIM), jnp.bfloat16)
            for key, n in zip(keys, heads, strict=True)
        ]

    return make


def passes(call, tensors, tables) -> dict[str, Callable]:
    """The forward pass, and the gradients alone, from saved residuals."""
    q, k, v, dout = tensors
    forward = jax.jit(call)
    _, pull = jax.jit(lambda q, k, v, t: jax.vjp(lambda q, k, v: call(q, k, v, t), q, k, v))(
        q, k, v, tables
    )
    backward = jax.jit(lambda pull, dout: pull(dout))
    return {
        "forward": lambda: forward(q, k, v, tables),
        "backward": lambda: backward(pull, dout),
    }


def trace(folder: pathlib.Path, calls: dict[str, Callable]) -> None:
    """Profiles back-to-back calls of both passes, as many as settle the pace of the card."""
    quiet = jax.profiler.ProfileOptions()
    quiet.host_tracer_level = quiet.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=quiet):
        for call in calls.values():
            run(call, max(1, int(TRACED_S / run(call, 1))))


def row(
    label: dict, times: dict[str, float], flops: float, beside: dict[str, list[float]] | None
) -> dict:
    """Figures of one of them, printed by the first process; ``beside`` has its ratios, with errors."""
    result = dict(label)
    for name, factor in (("forward", 1.0), ("backward", 2.5)):
        result[f"{name}_ms"] = times[name] * 1e3
        result[f"{name}_tflops"] = factor * flops / times[name] / 1e12
        if beside:
            result[f"{name}_ratio"], result[f"{name}_ratio_error"] = beside[name]
    if jax.process_index() == 0:
        shown = "".join(f"  {each[0]:.3f} +- {each[1]:.3f}" for each in (beside or {}).values())
        print(
            f"{result['mask']:22} {result['heads']:6} {result['transport']:9}"
            f" fwd {result['forward_tflops']:5.0f} bwd {result['backward_tflops']:5.0f} TFLOP/s"
            f" {shown}  imbalance {result['imbalance']:.3f} stages {result['remote_stages']}"
            f"/{result['backward_stages']}"
            f" rows {result['remote_rows']} late {result['late_rows']}",
            flush=True,
        )
    return result


if __name__ == "__main__":
    main()
