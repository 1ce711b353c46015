"""Compares the model with steps that really ran on several GPUs.

Steps of `dist_attention` are timed over all GPUs; the kernels of each rank alone on the first GPU, casts
and reduces alone over all. The model lays the latter side by side as it does for 64 ranks; its error is how
far that is from the former.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from provenance import save
from timing import seconds

from magi_jax import DistOptions, dist_attention, group_cast, group_reduce
from magi_jax.comm import symmetric_memory
from magi_jax.ops import Implementation, get_implementation
from magi_jax.plan import AttentionPlan, CommMeta, PlanConfig, StageTables, make_plan
from scaling.machine import Machine, Moves, Times
from scaling.measure import Bench
from scaling.model import our_us
from scaling.work import (
    FLOPS_PER_PAIR,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    OURS,
    Problem,
    make_work,
    problems,
)

MASKS = ("full", "causal", "varlen_full", "varlen_causal", "swa_causal", "prefix_lm")
TRANSPORTS = ("native", "portable")
ROWS = PartitionSpec("cp")


def check_all(args) -> None:
    """Checks problems of all lengths over all devices, and stores what was found."""
    started = time.perf_counter()
    ranks = len(jax.devices())
    mesh = jax.make_mesh((ranks,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    bench = Bench(get_implementation(args.implementation))
    posed = {
        tokens: problems(ranks, tokens, args.masks)
        for tokens in dict.fromkeys(args.tokens_per_rank)
    }
    timed: dict[str, dict[str, float]] = {}
    rows: list[dict] = []
    for transport, tokens, name in itertools.product(args.transports, posed, args.masks):
        if time.perf_counter() - started > args.budget_s:
            break
        row = check(posed[tokens][name], mesh, bench, transport, timed)
        place = {"mask": name, "tokens_per_rank": tokens, "ranks": ranks, "transport": transport}
        rows.append({**place, **row})
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()})
        save(args.json, args.commit, {"rows": rows})


@contextlib.contextmanager
def options_of(transport: str, mesh: Mesh, implementation: Implementation) -> Iterator[DistOptions]:
    """Options of a call over a transport; the native one has its memory inside the context alone."""
    if transport == "portable":
        yield DistOptions(implementation=implementation)
        return
    with symmetric_memory(mesh, "cp") as memory:
        yield DistOptions(implementation=implementation, transport=memory.transport)


def check(
    problem: Problem, mesh: Mesh, bench: Bench, transport: str, timed: dict[str, dict[str, float]]
) -> dict:
    """Measured and predicted microseconds of one problem; times of its pieces are added to ``timed``."""
    ranks = mesh.size
    pieces: dict = {}
    work = make_work(OURS, problem, ranks, pieces)
    for key, piece in pieces.items():
        if key not in timed:
            timed[key] = bench.measure(piece, FLOPS_PER_PAIR)
    times = Times(
        *(
            np.array([[timed[key][which] if key else 0.0 for key in row] for row in calls])
            for which, calls in (("forward", work.calls), ("backward", work.backward_calls))
        )
    )
    plan = make_plan(problem.mask, ranks, PlanConfig(ranks_per_node=ranks))
    if plan.travel is not None:
        raise ValueError("this check is for masks whose queries do not travel")
    plan = jax.device_put(plan, NamedSharding(mesh, ROWS))
    with options_of(transport, mesh, bench.implementation) as options:
        moves = {
            "forward": transfers(plan.forward_stages, mesh, options),
            "backward": transfers(plan.backward_stages, mesh, options),
        }
        measured = steps(plan, mesh, options)
    predicted = our_us(work, times, moves, Machine())
    result: dict = {}
    for which, per_pair in FLOPS_PER_PAIR.items():
        flops = per_pair * problem.mask.area * NUM_HEADS * HEAD_DIM / ranks
        result[f"{which}_cast_us"] = moves[which].cast[:, 0].tolist()
        result[f"{which}_us"] = measured[which]
        result[f"{which}_predicted_us"] = predicted[which]
        result[f"{which}_error"] = predicted[which] / measured[which] - 1
        result[which] = flops / measured[which] / 1e6
        result[f"{which}_kernel_us"] = float(times.kernel_us(which).max())
        result[f"{which}_calls_us"] = getattr(times, which).round(1).tolist()
    result["late_rows"] = [work.late_rows, work.backward_late_rows]
    result["reduce_us"] = moves["backward"].reduce[:, 0].tolist()
    return result


def steps(plan: AttentionPlan, mesh: Mesh, options: DistOptions) -> dict[str, float]:
    """Microseconds of forward, and of backward from saved residuals."""
    rows = plan.cp_size * plan.spec.local_len
    heads = NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS
    make = jax.jit(
        lambda key, n: jax.random.normal(key, (rows, n, HEAD_DIM), jnp.bfloat16),
        static_argnums=1,
        out_shardings=NamedSharding(mesh, ROWS),
    )
    q, k, v, dout = (make(jax.random.key(i), n) for i, n in enumerate(heads))

    def call(q, k, v, plan):
        return dist_attention(q, k, v, plan, mesh=mesh, options=options)

    forward = jax.jit(call)
    start = jax.jit(lambda q, k, v, plan: jax.vjp(lambda *x: call(*x, plan), q, k, v))
    finish = jax.jit(lambda pull, dout: pull(dout))
    _, pull = start(q, k, v, plan)
    return {
        "forward": 1e6 * seconds(lambda: forward(q, k, v, plan)),
        "backward": 1e6 * seconds(lambda: finish(pull, dout)),
    }


def transfers(stages: StageTables, mesh, options: DistOptions) -> Moves:
    """Microseconds of the cast and of the reduce of each remote stage, alone, the same on all ranks."""
    ways = [(comm, comm) for comm in stages.comm]
    if (late := stages.late) is not None:
        ways.append((late.comm, late.comm if late.shared is None else late.shared.comm))

    def cast(kv, comm):
        return group_cast(kv, comm, "cp", transport=options.transport)

    def reduce(dkv, comm):
        return group_reduce(dkv, comm, "cp", transport=options.transport)

    def time(fn, rows: int, dtype, comm: CommMeta) -> float:
        shape = mesh.size * rows, NUM_KV_HEADS, HEAD_DIM
        place = NamedSharding(mesh, ROWS)
        given = [jax.device_put(jnp.ones(shape, dtype), place) for _ in range(2)]
        call = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False))
        return 1e6 * seconds(lambda: call(given, comm), budget_s=0.05)

    casts = [time(cast, out.src_rows, jnp.bfloat16, out) for out, _ in ways]
    reduces = [time(reduce, back.dst_rows, jnp.float32, back) for _, back in ways]
    spread = np.ones((1, mesh.size))
    return Moves(np.array(casts)[:, None] * spread, np.array(reduces)[:, None] * spread)
