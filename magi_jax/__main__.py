"""Commands: ``python -m magi_jax explain mask.json --cp 64`` and ``python -m magi_jax info``."""

import argparse
import sys
from pathlib import Path

import magi_jax
from magi_jax.explain import FORMS, advice, load_mask
from magi_jax.plan import PlanConfig, make_plan
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.dispatch.strategies import STRATEGIES

# Of the mask in letters, in twice as many columns of letters: half a screen.
SKETCH_ROWS = 24


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m magi_jax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_explain(commands)
    commands.add_parser("info", help="versions, and how the extension was built")
    flags = parser.parse_args(arguments)
    if flags.command == "info":
        for name, value in magi_jax.build_info().items():
            print(f"{name}: {value}")
        return 0
    try:
        return _explain(flags)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _add_explain(commands) -> None:
    parser = commands.add_parser(
        "explain",
        help="plan a mask, print the report and draw the picture",
        description=FORMS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mask", type=Path, help="JSON file that describes the mask")
    parser.add_argument("--cp", type=int, required=True, help="ranks that share the sequence")
    parser.add_argument("--ranks-per-node", type=int, help="ranks with a fast link; default: all")
    parser.add_argument("--chunk-size", type=int, help="tokens that move together")
    parser.add_argument("--dispatch", default="balanced", choices=sorted(STRATEGIES))
    parser.add_argument("--effort", default="fast", help="fast or high")
    parser.add_argument("--heads", type=int, default=64, help="query heads on a GPU")
    parser.add_argument("--kv-heads", type=int, default=8, help="key and value heads on a GPU")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype-bytes", type=int, default=2, help="bytes of a key or value")
    parser.add_argument("--cost-model", type=Path, help="JSON file of rates of your machine")
    parser.add_argument("--out", type=Path, default=Path("plan.png"), help="picture to write")
    parser.add_argument("--no-picture", action="store_true", help="print the report only")


def _explain(flags: argparse.Namespace) -> int:
    mask = load_mask(flags.mask)
    if flags.cost_model is None:
        model = CostModel(
            num_heads=flags.heads,
            num_kv_heads=flags.kv_heads,
            head_dim=flags.head_dim,
            dtype_bytes=flags.dtype_bytes,
        )
    else:
        model = CostModel.from_json(flags.cost_model)
    config = PlanConfig(
        chunk_size=flags.chunk_size,
        dispatch=flags.dispatch,
        ranks_per_node=flags.ranks_per_node,
        effort=flags.effort,
        cost_model=model,
    )
    plan = make_plan(mask, flags.cp, config)
    report = plan.report(model, flags.ranks_per_node, mask)
    print(
        f"mask: {mask.q_len:,} tokens, {mask.num_slices:,} slices, {mask.density:.2%} of all pairs"
        " (queries down, keys across)"
    )
    print(mask.sketch(SKETCH_ROWS))
    print(f"plan: chunks of {plan.spec.chunk_size:,} tokens, fingerprint {plan.fingerprint()}")
    print(report)
    row_bytes = 2 * model.num_kv_heads * model.head_dim * model.dtype_bytes
    worst = int(report.recv_rows.max())
    print(
        f"keys and values received by the worst rank: {worst * row_bytes / 2**20:,.1f} MiB a layer and"
        f" forward pass ({model.num_kv_heads} kv heads of {model.head_dim}, {model.dtype_bytes} bytes)"
    )
    for sentence in advice(report):
        print(sentence)
    if not flags.no_picture:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            plan.plot(flags.out, report)
        except ImportError as error:
            raise ImportError(f"{error}, or say --no-picture") from None
        print(f"picture: {flags.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
