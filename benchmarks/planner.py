"""Measures the planner: what its plans cost and how long they take to make, mask by mask.

    python benchmarks/planner.py [--cp 8 16 32 64] [--seeds 0 1 2] [--effort fast] [--workloads FILE]

Prints one table and writes JSON. Rows are over the sequence length; times are CPU time of one thread.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from planner_masks import FAMILIES, load_families
from provenance import describe

from magi_jax.masks import AttnMask, bands
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.solver import bounds, dispatch, remote, stages, timeline
from magi_jax.solver.balanced_units import make_units
from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.strategies import STRATEGIES

TOKENS_PER_RANK, CHUNK, NODE = 8192, 1024, 8
# Masks whose traffic a better dispatch can lower; full and causal are at their bound, and one rank sees all
# of a global block.
IMPROVABLE = (
    "varlen_full", "varlen_causal", "varlen_causal_short", "swa_causal", "varlen_block_causal",
    "shared_question", "prefix_lm", "bicausal_window",
)  # fmt: skip
# MagiAttention v1.1.1, its own solver on one seed of these families; see docs/planner.md for the source.
# cp: {mask: (imbalance, received / S, sent / S)}, and milliseconds per rank at cp 64.
PUBLISHED = {
    8: {
        "full": (None, 0.875, 0.875), "causal": (None, 0.875, 0.875),
        "varlen_full": (None, 0.528, 0.482), "varlen_causal": (None, 0.438, 0.345),
        "varlen_causal_short": (None, 0.282, 0.450), "swa_causal": (None, 0.125, 0.125),
        "varlen_block_causal": (None, 0.616, 0.604), "block_causal_global": (1.166, None, None),
        "shared_question": (None, 0.386, 0.516), "prefix_lm": (None, 0.592, 0.565),
        "bicausal_window": (None, 0.200, 0.179),
    },
    64: {
        "full": (1.000, 0.984, 0.984), "causal": (1.000, 0.984, 0.984),
        "varlen_full": (1.003, 0.229, 0.203), "varlen_causal": (1.007, 0.154, 0.206),
        "varlen_causal_short": (1.292, 0.061, 0.103), "swa_causal": (1.001, 0.016, 0.016),
        "varlen_block_causal": (1.032, 0.251, 0.317), "block_causal_global": (3.709, 0.984, 0.391),
        "shared_question": (1.014, 0.105, 0.189), "prefix_lm": (1.010, 0.227, 0.250),
        "bicausal_window": (1.011, 0.030, 0.029),
    },
}  # fmt: skip
PUBLISHED_MS_PER_RANK = (50.0, 127.0)


def measure(problem: dispatch.DispatchProblem, strategy: str, model: CostModel) -> dict:
    """What one dispatch costs, counted from its exact remote ranges."""
    cp_size, seq_len = problem.cp_size, int(problem.edges[-1])
    per_node = min(problem.ranks_per_node, cp_size)
    dispatch_ms, assignment = _timed(lambda: STRATEGIES[strategy](problem))
    layout = dispatch.make_layout(assignment, cp_size)
    cut = remote.cut_queries(problem.slices, layout)
    far = remote.remote_ranges(cut, layout)
    size = far.end - far.begin
    traffic = np.zeros((1, cp_size, cp_size))
    np.add.at(traffic[0], (far.src, far.dst), size)
    node = np.arange(cp_size) // per_node
    crosses = node[far.src] != node[far.dst]
    group, begin, end = remote.intervals.union(
        node[far.dst][crosses], far.begin[crosses], far.end[crosses]
    )
    entering = np.bincount(group, end - begin, cp_size // per_node)
    area = np.bincount(cut.rank, bands.area(cut.slices), cp_size)
    work_slices = stages.stage_slices(cut, far, layout, 1)
    works = timeline.even_stages(work_slices, traffic, TOKENS_PER_RANK, per_node, model)
    split = works[timeline.fastest(works)]
    num_stages = len(split.cast_us)
    return {
        "imbalance": float(area.max() / area.mean()),
        "recv": float(traffic[0].sum(axis=0).max() / seq_len),
        "send": float(traffic[0].sum(axis=1).max() / seq_len),
        "node": float(entering.max() / seq_len),
        "total": float(traffic.sum() / seq_len / cp_size),
        "slices": int(sum(np.bincount(w.rank, minlength=cp_size) for w in work_slices).max()),
        "stages": num_stages,
        "forward_efficiency": timeline.simulate(split).efficiency(works[0].forward_us),
        "backward_efficiency": timeline.simulate(split, True).efficiency(works[0].backward_us),
        "dispatch_ms": dispatch_ms,
    }


def run_case(mask: AttnMask, cp_size: int, effort: str, model: CostModel) -> dict:
    """Our dispatch and min-heap's for one mask, bounds, and the time of a whole plan."""
    edges = dispatch.chunk_edges(mask.q_len, CHUNK)
    per_node = min(NODE, cp_size)
    problem = dispatch.DispatchProblem(mask.slices, edges, cp_size, per_node, effort)
    config = PlanConfig(chunk_size=CHUNK, ranks_per_node=per_node, effort=effort)
    plan_ms, _ = _timed(lambda: make_plan(mask, cp_size, config))
    ours = measure(problem, "balanced", model)
    bound = bounds.lower_bounds(make_units(problem), cp_size, per_node)
    return {
        "mask_slices": mask.num_slices,
        "plan_ms": plan_ms,
        "balanced": ours,
        "lpt": measure(problem, "lpt", model),
        "bound": {
            "rows": bound.rank_rows / mask.q_len,
            "node": bound.node_rows / mask.q_len,
            "imbalance": bound.imbalance,
        },
        "gap": bounds.gap(max(ours["recv"], ours["send"]), bound.rank_rows / mask.q_len),
    }


def _timed(f, repeats: int = 3):
    """(CPU milliseconds of the fastest call, result)."""
    best, result = float("inf"), None
    for _ in range(repeats):
        started = time.process_time()
        result = f()
        best = min(best, time.process_time() - started)
    return best * 1e3, result


def _mean(cases: list[dict], *path: str) -> float:
    values = []
    for case in cases:
        for key in path:
            case = case[key]
        values.append(case)
    return float(np.mean(values))


def print_table(cp_size: int, results: dict[str, list[dict]]) -> None:
    """One line for each mask, means over seeds; the worst seed for balance."""
    published = PUBLISHED.get(cp_size, {})
    print(
        f"\ncp {cp_size}, S = {TOKENS_PER_RANK * cp_size:,}; ours / min-heap / published min-heap"
    )
    print(
        f"{'mask':20} {'imbalance (worst seed)':24} {'recv/S':20} {'send/S':20} {'node/S':13}"
        f" {'bound':6} {'slices':9} {'fwd eff.':10} {'bwd eff.':10} {'disp ms':>7} {'plan ms':>7}"
    )
    for name, cases in results.items():
        imbalance = [max(c[d]["imbalance"] for c in cases) for d in ("balanced", "lpt")]
        there = [f"{v:.3f}" if v is not None else "-" for v in published.get(name, (None,) * 3)]
        cells = [f"{imbalance[0]:.4f} / {imbalance[1]:.3f} / {there[0]}"]
        for key, old in (("recv", there[1]), ("send", there[2])):
            ours, heap = (_mean(cases, d, key) for d in ("balanced", "lpt"))
            cells.append(f"{ours:.3f} / {heap:.3f} / {old}")
        pairs = [
            tuple(_mean(cases, d, key) for d in ("balanced", "lpt"))
            for key in ("node", "slices", "forward_efficiency", "backward_efficiency")
        ]
        print(
            f"{name:20} {cells[0]:24} {cells[1]:20} {cells[2]:20} {pairs[0][0]:.3f}/{pairs[0][1]:.3f}  "
            f" {_mean(cases, 'bound', 'rows'):.3f}  {pairs[1][0]:3.0f}/{pairs[1][1]:<3.0f} "
            f"  {pairs[2][0]:.2f}/{pairs[2][1]:.2f}  {pairs[3][0]:.2f}/{pairs[3][1]:.2f} "
            f" {_mean(cases, 'balanced', 'dispatch_ms'):7.1f} {_mean(cases, 'plan_ms'):7.1f}"
        )


def summary(results: dict[str, list[dict]]) -> dict[str, float]:
    """Means over the masks that can improve, against min-heap on the same masks."""

    def ratio(case, keys):
        ours, heap = (max(case[d][k] for k in keys) for d in ("balanced", "lpt"))
        return ours / heap if heap > 0 else 1.0

    cases = {name: results[name] for name in IMPROVABLE if name in results}
    if not cases:
        return {}
    return {
        "rows_against_min_heap": float(
            np.mean([[ratio(c, ("recv", "send")) for c in v] for v in cases.values()])
        ),
        "node_rows_against_min_heap": float(
            np.mean([[ratio(c, ("node",)) for c in v] for v in cases.values()])
        ),
        "worst_imbalance": max(c["balanced"]["imbalance"] for v in cases.values() for c in v),
        "mean_dispatch_ms": float(
            np.mean([[c["balanced"]["dispatch_ms"] for c in v] for v in results.values()])
        ),
        "mean_plan_ms": float(np.mean([[c["plan_ms"] for c in v] for v in results.values()])),
    }


def main() -> None:
    """Parses flags, runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--masks", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--effort", choices=("fast", "high"), default="fast")
    parser.add_argument("--workloads", type=Path, help="Python file whose make() gives the masks")
    parser.add_argument("--cost-model", type=Path, help="JSON table of rates")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    args = parser.parse_args()
    families = load_families(args.workloads) if args.workloads else FAMILIES
    model = CostModel.from_json(args.cost_model) if args.cost_model else CostModel()
    report = {
        **describe(),
        "effort": args.effort,
        "seeds": args.seeds,
        "published_ms_per_rank": PUBLISHED_MS_PER_RANK,
    }
    for cp_size in args.cp:
        results = {
            name: [
                run_case(
                    families[name](TOKENS_PER_RANK * cp_size, seed), cp_size, args.effort, model
                )
                for seed in args.seeds
            ]
            for name in args.masks
        }
        print_table(cp_size, results)
        report[f"cp{cp_size}"] = {"summary": summary(results), "masks": results}
        print("  " + ", ".join(f"{k} {v:.3f}" for k, v in summary(results).items()), flush=True)
    out = args.out or Path(__file__).parent / "results" / f"planner_{args.effort}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
