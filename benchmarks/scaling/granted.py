"""What the model says of strategies over GPUs that really ran them."""

import functools
import json

from baselines.base import Problem
from distributed import cases
from provenance import save

from scaling.commands import all_work, fit_to, kernel_times, read_times
from scaling.links import MEASURED, step_over
from scaling.machine import Machine
from scaling.model import step_us
from scaling.orders import predict
from scaling.problems import document_lengths
from scaling.work import FLOPS_PER_PAIR, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Piece, make_work


def granted(args) -> None:
    """Rates of the model beside those that `rivals.py` measured, over usual links and measured ones."""
    _, timed = read_times(args.kernels)
    fitted, _ = fit_to(timed, all_work(args).pieces)
    rows = []
    for ran in json.loads(args.rivals.read_text())["rows"]:
        if ran["heads"] != f"{NUM_HEADS}:{NUM_KV_HEADS}" or "forward" not in ran:
            continue
        problem = problem_of(ran["mask"], ran["tokens"] * ran["ranks"])
        pieces: dict[str, Piece] = {}
        work = make_work(ran["strategy"], problem, ran["ranks"], pieces)
        times, _ = kernel_times(work, predict(pieces, fitted), {})
        row = {key: ran[key] for key in ("mask", "tokens", "ranks", "strategy")}
        step = ran["strategy"], work, times, ran["ranks"]
        for name, us in (
            ("model", step_us(*step, Machine())),
            ("with_measured_links", step_over(MEASURED, *step)),
        ):
            flops = problem.mask.area * NUM_HEADS * HEAD_DIM / ran["ranks"]
            row[name] = {w: round(float(FLOPS_PER_PAIR[w] * flops / us[w] / 1e6), 1) for w in us}
        rows.append({**row, "ran": {which: round(ran[which], 1) for which in FLOPS_PER_PAIR}})
        print(rows[-1], flush=True)
    save(args.out, args.commit, {"rows": rows})


@functools.cache
def problem_of(mask: str, tokens: int) -> Problem:
    """The mask of a name and number of tokens in `distributed.py`, with its documents."""
    made = cases(tokens)[mask]
    return Problem(made, document_lengths(made))
