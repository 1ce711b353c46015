"""Compares the model with steps that really ran on several GPUs.

Steps of `dist_attention` are timed over all GPUs; the kernels of each rank alone on its GPU, since cards
differ, at the pace that they themselves settle; casts and reduces alone over all. The model lays the latter
side by side as it does for 64 ranks; its error is how far that is from the former. Plans are those that
`make_plan` chooses, and such that take each GPU for a node, in two stages whose rows move in two steps, as
between nodes.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from provenance import save
from timing import seconds, steady_seconds

from magi_jax import DistOptions, dist_attention, group_cast, group_reduce
from magi_jax.comm import symmetric_memory
from magi_jax.ops import Implementation, get_implementation
from magi_jax.plan import AttentionPlan, CommMeta, PlanConfig, StageTables, make_plan
from scaling.machine import Machine, Moves, Times
from scaling.measure import Bench
from scaling.model import our_us
from scaling.problems import Problem, problems
from scaling.work import (
    FLOPS_PER_PAIR,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Piece,
    our_work,
)

MASKS = ("full", "causal", "varlen_full", "varlen_causal", "swa_causal", "prefix_lm")
TRANSPORTS = ("native", "portable")
WAYS = ("chosen", "two steps")  # of plans
ROWS = PartitionSpec("cp")


def check_all(args) -> None:
    """Checks problems of all lengths over all devices, and stores what was found."""
    started = time.perf_counter()
    ranks = len(jax.devices())
    mesh = jax.make_mesh((ranks,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    implementation = get_implementation(args.implementation)
    benches = [Bench(implementation, device) for device in jax.devices()]
    posed = {
        tokens: problems(ranks, tokens, args.masks)
        for tokens in dict.fromkeys(args.tokens_per_rank)
    }
    timed: dict[tuple[int, str], dict[str, float]] = {}
    rows: list[dict] = []
    every = itertools.product(args.transports, args.plans, posed, args.masks)
    for transport, way, tokens, name in every:
        if time.perf_counter() - started > args.budget_s:
            break
        row = check(posed[tokens][name], mesh, benches, (transport, way, args.repeats), timed)
        place = {
            "mask": name, "tokens_per_rank": tokens, "ranks": ranks, "transport": transport,
            "plan": way,
        }  # fmt: skip
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


def make_plan_of(way: str, problem: Problem, ranks: int) -> AttentionPlan:
    """The plan of one of the `WAYS`."""
    if way == "chosen":
        return make_plan(problem.mask, ranks, PlanConfig(ranks_per_node=ranks))
    config = PlanConfig(ranks_per_node=1, two_level=True, overlap=2, travelling="never")
    return make_plan(problem.mask, ranks, config)


def check(
    problem: Problem, mesh: Mesh, benches: list[Bench], how: tuple[str, str, int], timed: dict
) -> dict:
    """Measured and predicted microseconds of one problem.

    Args:
        benches: one for each rank, on its device.
        how: transport, way of the plan, and how often a program repeats a step.
        timed: microseconds by pass, of pieces by rank and name; those of this problem are added.
    """
    ranks = mesh.size
    transport, way, repeats = how
    plan = make_plan_of(way, problem, ranks)
    if plan.travel is not None:
        raise ValueError("this check is for masks whose queries do not travel")
    pieces: dict = {}
    work = our_work(plan, ranks, pieces)
    passes = {"forward": work.calls, "backward": work.backward_calls}
    time_kernels(passes, pieces, benches, timed)
    times = Times(
        *(
            np.array(
                [
                    [timed[rank, key][which] if key else 0.0 for key in row]
                    for rank, row in enumerate(calls)
                ]
            )
            for which, calls in passes.items()
        )
    )
    plan = jax.device_put(plan, NamedSharding(mesh, ROWS))
    with options_of(transport, mesh, benches[0].implementation) as options:
        moves = {
            "forward": transfers(plan.forward_stages, mesh, options),
            "backward": transfers(plan.backward_stages, mesh, options),
        }
        measured = steps(plan, mesh, options, repeats)
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


def time_kernels(
    passes: dict[str, np.ndarray], pieces: dict[str, Piece], benches: list[Bench], timed: dict
) -> None:
    """Times the calls of each rank on its device, as steadily as steps are timed.

    Args:
        passes: names of the calls of each pass, ``[ranks, calls]``.
        pieces: by name.
        benches, timed: see `check`.
    """
    for rank, bench in enumerate(benches):
        with jax.default_device(bench.device):
            for which, calls in passes.items():
                for key in filter(None, calls[rank].tolist()):
                    found = timed.setdefault((rank, key), {})
                    if which not in found:
                        found[which] = 1e6 * steady_seconds(bench.call(pieces[key], which))


def steps(plan: AttentionPlan, mesh: Mesh, options: DistOptions, repeats: int) -> dict[str, float]:
    """Microseconds of forward, and of backward from saved residuals.

    Both are repeated inside a program, one after the other, so that short ones do not wait for the host.
    """
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

    forward = jax.jit(lambda qs, *rest: in_order(lambda q: call(q, *rest), qs))
    start = jax.jit(lambda q, k, v, plan: jax.vjp(lambda *x: call(*x, plan), q, k, v))
    finish = jax.jit(in_order)
    _, pull = start(q, k, v, plan)
    qs, douts = ([x, *(jnp.array(x, copy=True) for _ in range(repeats - 1))] for x in (q, dout))
    return {
        "forward": 1e6 / repeats * steady_seconds(lambda: forward(qs, k, v, plan)),
        "backward": 1e6 / repeats * steady_seconds(lambda: finish(pull, douts)),
    }


def in_order(call: Callable, inputs: list[jax.Array]) -> list:
    """Results of calls, none of which begins before the one before it has ended."""
    results = [call(inputs[0])]
    for x in inputs[1:]:
        x, results[-1] = jax.lax.optimization_barrier((x, results[-1]))
        results.append(call(x))
    return results


def transfers(stages: StageTables, mesh, options: DistOptions) -> Moves:
    """Microseconds of the cast and of the reduce of each remote stage, alone, the same on all ranks."""
    ways = [(comm.steps, comm.steps) for comm in stages.comm]
    if (late := stages.late) is not None:
        back = late.comm if late.shared is None else late.shared.comm
        ways.append(((late.comm,), (back,)))

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

    def times(step: int) -> list[np.ndarray]:
        casts = [time(cast, out[step].src_rows, jnp.bfloat16, out[step]) for out, _ in ways]
        reduces = [time(reduce, out[step].dst_rows, jnp.float32, out[step]) for _, out in ways]
        return [np.array(us)[:, None] * np.ones((1, mesh.size)) for us in (casts, reduces)]

    if any(len(out) > 1 for out, _ in ways):
        return Moves(*times(0), np.stack(times(1)))
    return Moves(*times(0))
