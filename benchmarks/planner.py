"""Measures the planner: what its plans cost and how long they take to make, mask by mask.

    python benchmarks/planner.py [--cp 8 16 32 64] [--seeds 0 1 2] [--effort fast] [--workloads FILE]

Prints one table for each number of ranks, then what was reached of the targets at 64 and what bad input is
answered with (`planner_bad_input`); writes JSON where ``--out`` says so. Rows are over the sequence length;
times are CPU time of the process, the least of five calls with effort fast, of one with high.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from planner_bad_input import print_bad_input
from planner_masks import FAMILIES, load_families
from planner_targets import IMPROVABLE, check_targets, ratio
from provenance import describe

from magi_jax.masks import AttnMask, bands
from magi_jax.plan import AttentionPlan, PlanConfig, PlanReport, SliceTable, make_plan
from magi_jax.plan.two_level import pieces_of
from magi_jax.solver import dispatch
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.dispatch.strategies import STRATEGIES

TOKENS_PER_RANK, CHUNK, NODE = 8192, 1024, 8
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


def measure(
    plan: AttentionPlan, model: CostModel, per_node: int, mask: AttnMask | None = None
) -> dict:
    """What one plan costs, counted from its tables; given its mask, also how far from its bounds it is."""
    report = plan.report(model, per_node, mask)
    seq_len = report.seq_len
    others = [part for part in (plan.travel, plan.late) if part is not None]
    tables = [*plan.calc, *(part.calc for part in others)]
    return {
        "imbalance": report.imbalance,
        "recv_rows": int(report.recv_rows.max()),
        "recv": float(report.recv_rows.max() / seq_len),
        "send": float(report.send_rows.max() / seq_len),
        "node": float(_rows_into_nodes(plan, per_node).max() / seq_len),
        "of_all_gather": float(report.recv_rows.sum() / report.ring_rows.sum()),
        "travelling_rows": int(report.travel_traffic.sum(axis=0).max()),
        "redundancy": report.redundancy,
        "slices": int(sum(_slices(table) for table in tables).max()),
        "stages": [report.stages, report.backward_stages],
        "forward_efficiency": report.forward_efficiency,
        "backward_efficiency": report.backward_efficiency,
        "predicted_us": report.predicted_us,
        **({} if report.bounds is None else _bounds(report)),
    }


def _bounds(report: PlanReport) -> dict:
    return {
        "bound": {
            "rows": report.bounds.rank_rows / report.seq_len,
            "node": report.bounds.node_rows / report.seq_len,
            "imbalance": report.bounds.imbalance,
        },
        "gap": report.gap,
    }


def _rows_into_nodes(plan: AttentionPlan, per_node: int) -> np.ndarray:
    """Distinct key rows that enter each node."""
    positions = np.asarray(plan.positions, np.int64)
    entered = [np.zeros(plan.spec.seq_len, bool) for _ in range(plan.cp_size // per_node)]
    for meta in (*plan.comm, *([] if plan.late is None else [plan.late.comm])):
        for source, rank, row, _, n_rows in zip(*pieces_of(meta), strict=True):
            if source // per_node != rank // per_node:
                first = positions[source, row]
                entered[rank // per_node][first : first + n_rows] = True
    return np.array([rows.sum() for rows in entered])


def _slices(table: SliceTable) -> np.ndarray:
    """Slices of each rank."""
    return (table.slices[:, :, bands.Q_START] < table.slices[:, :, bands.Q_END]).sum(axis=1)


def run_case(mask: AttnMask, cp_size: int, effort: str, model: CostModel) -> dict:
    """Our plan and min-heap's for one mask, bounds, and how long ours took."""
    per_node = min(NODE, cp_size)
    config = PlanConfig(chunk_size=CHUNK, ranks_per_node=per_node, effort=effort, cost_model=model)
    repeats = 5 if effort == "fast" else 1
    plan_ms, plan = _timed(lambda: make_plan(mask, cp_size, config), repeats)
    ours = measure(plan, model, per_node, mask)
    heap = dataclasses.replace(config, dispatch="lpt", travelling="never")
    problem = dispatch.DispatchProblem(
        mask.slices, dispatch.chunk_edges(mask.q_len, CHUNK), cp_size, per_node, effort
    )
    # With high effort nearly all of the time goes into the dispatch.
    dispatch_ms = plan_ms
    if effort == "fast":
        dispatch_ms, _ = _timed(lambda: STRATEGIES["balanced"](problem), repeats)
    return {
        "mask_slices": mask.num_slices,
        "plan_ms": plan_ms,
        "dispatch_ms": dispatch_ms,
        "balanced": ours,
        "lpt": measure(make_plan(mask, cp_size, heap), model, per_node),
        "bound": ours.pop("bound"),
        "gap": ours.pop("gap"),
    }


def _timed(f, repeats: int):
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
            f" {_mean(cases, 'dispatch_ms'):7.1f} {_mean(cases, 'plan_ms'):7.1f}"
        )


def summary(results: dict[str, list[dict]]) -> dict[str, float]:
    """Means over the masks that can improve, against min-heap on the same masks."""
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
            np.mean([[c["dispatch_ms"] for c in v] for v in results.values()])
        ),
        "mean_plan_ms": float(np.mean([[c["plan_ms"] for c in v] for v in results.values()])),
    }


def print_targets(effort: str, results: dict[str, list[dict]], own_masks: bool) -> list[dict]:
    """Prints what was reached of the targets, and returns it."""
    published = {}
    if own_masks:
        published = {name: max(figures[1:]) for name, figures in PUBLISHED[64].items()}
    rows = check_targets(effort, results, published)
    print(f"\ntargets at cp 64, effort {effort}")
    for what, reached, limit in rows:
        # Rounded as the limit is given.
        state = "reached" if round(reached, 3) <= limit else "MISSED"
        print(f"  {what:42} {reached:9.3f}   limit {limit:7g}   {state}")
    return [{"what": w, "reached": float(r), "limit": limit} for w, r, limit in rows]


def main() -> None:
    """Parses flags, runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--masks", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--effort", choices=("fast", "high"), default="fast")
    parser.add_argument("--workloads", type=Path, help="Python file whose make() gives the masks")
    parser.add_argument("--cost-model", type=Path, help="JSON table of rates")
    parser.add_argument(
        "--out", type=Path, default=None, help="where the JSON goes; nowhere by default"
    )
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
        if cp_size == 64:
            report["targets"] = print_targets(args.effort, results, bool(args.workloads))
            if args.effort == "fast":
                report["bad_input"] = print_bad_input()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()
