"""Attention over 8 to 64 GPUs, ours beside known strategies: kernels timed on one GPU, transfers modelled.

    python benchmarks/scaling prepare  [--cp 8 16 32 64] [--masks ...]     # CPU: what to time
    python benchmarks/scaling time     [--budget-s 180]                    # one GPU: kernel times, JSON
    python benchmarks/scaling simulate [--kernels FILE]                    # CPU: rates, JSON and pictures
    python benchmarks/scaling check    [--tokens-per-rank 8192 32768]      # several GPUs: the model's error
    python benchmarks/scaling granted  [--rivals FILE]                     # CPU: the same of other strategies

8192 tokens a rank, 64:8 heads of 128, bfloat16, nodes of 8. Each kernel call of each rank is a piece; equal
pieces are timed once, the slowest ranks of each strategy first. Pieces that were not timed take the time that
a fit to the timed ones gives them; the results say how many those are and how far the fit is off. The slowest
rank rules. `model.py` states what is hidden behind what, `machine.py` the links.

  problems          the masks
  work, orders      what each rank computes, in pieces, and which of them to time
  padded, measure   their tables and their times on a GPU
  fit               what those say of the others
  machine, model    transfers, and when our plans and the hybrid strategy are done
  rings             when strategies with collectives of fixed shape are done
  links             how far the comparison rests on the links that are assumed
  published, plot   rates that others published, and pictures of all
  commands, check, granted   what this program does
"""

import argparse
import pathlib
import sys

# Run as a folder, Python looks for modules in it and not beside it.
sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from provenance import RESULTS, ROOT  # noqa: E402

from scaling import check, commands, granted  # noqa: E402
from scaling.problems import TOKENS_PER_RANK  # noqa: E402

PIECES = ROOT / "outputs" / "scaling_pieces.npz"
KERNELS = RESULTS / "scaling_kernels.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parsers = parser.add_subparsers(dest="command", required=True)
    prepare, time, simulate, check_, granted_ = map(
        parsers.add_parser, ("prepare", "time", "simulate", "check", "granted")
    )
    for command in (prepare, time, simulate, granted_):
        command.add_argument("--cp", type=int, nargs="+", default=[8, 16, 32, 64])
        command.add_argument("--masks", nargs="+", help="names of masks; all by default")
        command.add_argument("--tokens-per-rank", type=int, default=TOKENS_PER_RANK)
    for command in (prepare, time):
        command.add_argument("--pieces", type=pathlib.Path, default=PIECES)
    for command in (time, simulate, check_, granted_):
        command.add_argument("--commit", help="commit of a tree without git")
    for command in (time, check_):
        command.add_argument(
            "--implementation", help="kernel by name; chosen by platform if not given"
        )
    time.add_argument("--budget-s", type=float, default=180.0)
    time.add_argument("--out", type=pathlib.Path, default=KERNELS)
    for command in (prepare, time, simulate, granted_):
        command.add_argument("--works", type=pathlib.Path, help="file that keeps plans and layouts")
        command.add_argument("--jobs", type=int, default=1, help="processes that make them")
        command.add_argument("--kernels", type=pathlib.Path, nargs="+", default=[KERNELS])
    simulate.add_argument("--out", type=pathlib.Path, default=RESULTS / "scaling.json")
    simulate.add_argument("--pictures", type=pathlib.Path, default=ROOT / "docs" / "pictures")
    granted_.add_argument("--rivals", type=pathlib.Path, default=RESULTS / "rivals_h200.json")
    granted_.add_argument("--out", type=pathlib.Path, default=RESULTS / "scaling_granted.json")
    check_.add_argument("--tokens-per-rank", type=int, nargs="+", default=[8192, 32768])
    check_.add_argument("--masks", nargs="+", default=list(check.MASKS))
    check_.add_argument(
        "--transports", nargs="+", choices=list(check.TRANSPORTS), default=list(check.TRANSPORTS)
    )
    check_.add_argument("--plans", nargs="+", choices=list(check.WAYS), default=list(check.WAYS))
    check_.add_argument("--repeats", type=int, default=3, help="of a step in one program")
    check_.add_argument("--budget-s", type=float, default=600.0)
    check_.add_argument("--json", type=pathlib.Path, default=RESULTS / "scaling_check.json")
    args = parser.parse_args()
    {
        "prepare": commands.prepare,
        "time": commands.time_on_gpu,
        "simulate": commands.simulate,
        "check": check.check_all,
        "granted": granted.granted,
    }[args.command](args)


if __name__ == "__main__":
    main()
