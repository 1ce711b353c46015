"""Times known ways to shard attention beside `dist_attention`, on GPUs that really run them.

    python benchmarks/rivals.py [--cp 8] [--tokens 8192] [--heads 64:8] [--masks ...] [--json FILE]

Masks, documents and rates are those of ``distributed.py``; the strategies are those of ``baselines``, with
this library's kernel. Each mask is timed strategy after strategy, ours first, so that all have the same
cards at the same warmth. `of_ours` is the rate of a strategy over ours. A strategy that does not serve a
number of heads or a mask is named with its reason. The same flags start one process per GPU.
"""

import argparse
from collections.abc import Callable

import jax
from baselines import layouts, strategies
from baselines.base import Problem, Strategy
from distributed import HEAD_DIM, cases, chosen, operands, our_passes, passes, plan_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from processes import add_process_flags, place, save_ranks, start
from scaling.problems import document_lengths
from scaling.work import strategy_names
from timing import steady_seconds

OURS = "magi_jax"
PACE = {"lead_s": 0.15, "budget_s": 0.2}  # of timed calls, and of those before them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192, help="per GPU")
    parser.add_argument("--heads", nargs="+", default=["64:8"], help="query heads:kv heads")
    parser.add_argument("--masks", nargs="+", help="names of masks, in order; all by default")
    parser.add_argument("--rivals", nargs="+", choices=strategies.names(), help="all by default")
    parser.add_argument("--transport", default="native", choices=["native", "portable"])
    parser.add_argument("--blocks", type=int, default=8, help="of a kernel that moves rows")
    add_process_flags(parser)
    args = parser.parse_args()
    mesh = start(args)
    masks = cases(args.tokens * mesh.size)
    rows: list[dict] = []
    for heads in args.heads:
        for name in args.masks or masks:
            problem = Problem(masks[name], document_lengths(masks[name]))
            rows += measure(mesh, name, problem, heads, args)
            save_ranks(args, mesh, rows)


def measure(
    mesh: Mesh, mask_name: str, problem: Problem, heads: str, args: argparse.Namespace
) -> list[dict]:
    """Rows of one mask: ours, then every rival that serves it."""
    flops = 4 * problem.mask.area * int(heads.split(":")[0]) * HEAD_DIM / mesh.size
    shared = {"mask": mask_name, "heads": heads, "tokens": args.tokens, "ranks": mesh.size}
    ours = rates(time_ours(mesh, problem, heads, args), flops)
    rows = [{**shared, "strategy": OURS, **ours}]
    show(rows[-1])
    served = strategy_names(problem, mesh.size)
    for name in args.rivals or strategies.names():
        if name not in served:
            continue  # the same as another one here, or too many slices to plan
        result: dict = {"strategy": name}
        try:
            times = time_rival(strategies.make(name, mesh.size), mesh, problem, heads)
        except ValueError as error:
            result["refused"] = str(error)
        else:
            result |= rates(times, flops)
            result |= {f"{way}_of_ours": result[way] / ours[way] for way in times}
        rows.append({**shared, **result})
        show(rows[-1])
    return rows


def time_ours(
    mesh: Mesh, problem: Problem, heads: str, args: argparse.Namespace
) -> dict[str, float]:
    """Seconds of both passes of `dist_attention`."""
    num_heads, num_kv_heads = map(int, heads.split(":"))
    plan = plan_of(problem.mask, mesh.size, (num_heads, num_kv_heads))
    tensors = operands(mesh, mesh.size * plan.spec.local_len, num_heads, num_kv_heads)
    placed = place(plan, NamedSharding(mesh, PartitionSpec("cp")))
    with chosen(args.transport, mesh, plan, (num_heads, num_kv_heads), args) as (which, check):
        times = timed(our_passes(tensors, placed, mesh, which))
        check()
    return times


def time_rival(strategy: Strategy, mesh: Mesh, problem: Problem, heads: str) -> dict[str, float]:
    """Seconds of both passes of a strategy over the devices of the mesh."""
    devices = list(mesh.devices.ravel())
    tables = strategy.tables(problem)
    rows = NamedSharding(mesh, PartitionSpec("cp"))
    placed = place(tables, rows)
    length = int(layouts.rows_held(strategy.layout(problem)).max())
    tensors = operands(mesh, mesh.size * length, *map(int, heads.split(":")))
    return timed(passes(strategy.attention(devices), tensors, placed))


def timed(calls: dict[str, Callable]) -> dict[str, float]:
    """Seconds of each pass."""
    return {name: steady_seconds(each, **PACE) for name, each in calls.items()}


def rates(times: dict[str, float], flops: float) -> dict[str, float]:
    """TFLOP/s of each GPU by pass."""
    factors = {"forward": 1.0, "backward": 2.5}
    return {way: factors[way] * flops / seconds / 1e12 for way, seconds in times.items()}


def show(found: dict) -> None:
    """Prints a row from the first process."""
    if jax.process_index():
        return
    label = f"{found['mask']:20} {found['heads']:6} {found['strategy']:22}"
    if "refused" in found:
        print(f"{label} refused: {found['refused']}", flush=True)
        return
    ratios = "".join(
        f"  {found[f'{way}_of_ours']:.3f}"
        for way in ("forward", "backward")
        if f"{way}_of_ours" in found
    )
    print(
        f"{label} forward {found['forward']:5.0f} backward {found['backward']:5.0f} TFLOP/s{ratios}",
        flush=True,
    )


if __name__ == "__main__":
    main()
