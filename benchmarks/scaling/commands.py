"""Prepares, times and simulates all problems and strategies."""

import json
import pathlib
import time

import numpy as np
from provenance import save

from scaling.fit import Fit, features, first_fit, fit
from scaling.machine import Machine, Times
from scaling.measure import SLOW, call_seconds, time_orders
from scaling.model import step_us
from scaling.orders import Order, Works, choose, load_orders, predict, save_orders
from scaling.work import (
    FLOPS_PER_PAIR,
    HEAD_DIM,
    NUM_HEADS,
    OURS,
    Piece,
    Problem,
    Work,
    make_work,
    problems,
    strategy_names,
)


def all_work(args) -> tuple[Works, dict[str, Piece], dict[tuple[int, str], Problem]]:
    """Works of all problems and strategies, their pieces, and the problems."""
    works: Works = {}
    pieces: dict[str, Piece] = {}
    posed = {}
    for cp in args.cp:
        started = time.perf_counter()
        for mask, problem in problems(cp, args.tokens_per_rank, args.masks).items():
            posed[cp, mask] = problem
            for name in strategy_names(problem, cp):
                works[cp, mask, name] = make_work(name, problem, cp, pieces)
        print(f"cp {cp}: {time.perf_counter() - started:.0f} s, {len(pieces)} pieces", flush=True)
    return works, pieces, posed


def prepare(args) -> dict[str, Order]:
    """Chooses pieces, writes them in the order of their worth, and says how long they should take."""
    works, pieces, _ = all_work(args)
    # By an earlier run where it timed any of these: kernels may have changed, their order hardly.
    _, timed = read_times([path for path in args.kernels if path.exists()])
    fitted = fit_to(timed, pieces) if set(timed) & set(pieces) else first_fit()
    steps = {}
    for (cp, mask, name), work in works.items():
        times, _ = kernel_times(work, pieces, {}, fitted)
        steps[cp, mask, name] = step_us(name, work, times, cp, Machine())
    wanted = choose(works, pieces, fitted, steps)
    chosen = {key: Order(pieces[key], tuple(sorted(passes))) for key, passes in wanted.items()}
    save_orders(args.pieces, chosen)
    predicted = predict({key: order.piece for key, order in chosen.items()}, fitted)
    seconds = sum(
        call_seconds(predicted[which][key]) for key in chosen for which in chosen[key].passes
    )
    print(f"{len(chosen)} of {len(pieces)} pieces, about {seconds:.0f} s, in {args.pieces}")
    return chosen


def time_on_gpu(args) -> None:
    """Times the prepared pieces, or prepares them first."""
    chosen = load_orders(args.pieces) if args.pieces.exists() else prepare(args)
    found = time_orders(chosen, args.budget_s, args.implementation)
    content = {
        "what": "microseconds of kernel calls by piece; see scaling.work.Piece.key",
        "implementation": args.implementation or "default",
        "pieces": {
            key: {
                **{which: round(us, 1) for which, us in times.items()},
                "area": chosen[key].piece.area,
                "heads": chosen[key].piece.heads,
            }
            for key, times in found.items()
        },
    }
    save(args.out, args.commit, content)


def simulate(args) -> None:
    """Rates of all strategies from the kernel times, as JSON and as pictures."""
    sources, timed = read_times(args.kernels)
    works, pieces, posed = all_work(args)
    fitted = fit_to(timed, pieces)
    machine = Machine()
    rows = []
    for (cp, mask, name), work in works.items():
        times, measured = kernel_times(work, pieces, timed, fitted)
        row = {"cp": cp, "mask": mask, "strategy": name, "measured": round(measured, 3)}
        for which, step in step_us(name, work, times, cp, machine).items():
            flops = FLOPS_PER_PAIR[which] * posed[cp, mask].mask.area * NUM_HEADS * HEAD_DIM
            row[which] = round(flops / cp / step / 1e6, 1)
            row[f"{which}_us"] = round(step, 1)
            row[f"{which}_kernel_us"] = round(float(times.kernel_us(which).max()), 1)
        rows.append(row)
    content = {
        "what": "simulated TFLOP/s per GPU; kernels timed on one GPU, transfers modelled",
        "machine": machine._asdict(),
        "kernels": [{k: v for k, v in source.items() if k != "pieces"} for source in sources],
        "timed_pieces": len(set(timed) & set(pieces)),
        "pieces": len(pieces),
        "fit_error": {w: [round(x, 3) for x in e] for w, e in fitted.errors.items()},
        "rows": rows,
    }
    save(args.out, args.commit, content)
    print_table(rows)
    if args.pictures:
        from scaling.plot import draw

        draw(rows, args.pictures)


def read_times(paths: list[pathlib.Path]) -> tuple[list[dict], dict[str, dict]]:
    """Result files of `time_on_gpu`, and the times by piece of all that ran on a card at its pace."""
    timed: dict[str, dict] = {}
    sources = [json.loads(path.read_text()) for path in paths]
    for source in sources:
        fastest = max(piece["matmul"] for piece in source["pieces"].values())
        kept = {k: p for k, p in source["pieces"].items() if p["matmul"] >= SLOW * fastest}
        left_out = len(source["pieces"]) - len(kept)
        print(f"{left_out} pieces were timed on a slow card and are left out")
        timed.update(kept)
    return sources, timed


def fit_to(timed: dict[str, dict], pieces: dict[str, Piece]) -> Fit:
    """The fit to those of the timed pieces that are among ``pieces``."""
    known = {key: features(pieces[key]) for key in timed if key in pieces}
    return fit(
        {
            which: [(known[key], timed[key][which]) for key in known if which in timed[key]]
            for which in FLOPS_PER_PAIR
        }
    )


def kernel_times(
    work: Work, pieces: dict[str, Piece], timed: dict[str, dict], fitted: Fit
) -> tuple[Times, float]:
    """Times of all calls of a work, and the share of their sum that was measured."""
    measured_us = total_us = 0.0

    def times_of(calls: np.ndarray, which: str) -> np.ndarray:
        nonlocal measured_us, total_us
        names, place = np.unique(calls, return_inverse=True)
        is_timed = np.array([which in timed.get(key, {}) for key in names])
        us = np.zeros(len(names))
        for index, key in enumerate(names):
            if is_timed[index]:
                us[index] = timed[key][which]
            elif key:
                us[index] = fitted.microseconds(features(pieces[key]), which)
        found = us[place].reshape(calls.shape)
        total_us += found.sum()
        measured_us += found[is_timed[place].reshape(calls.shape)].sum()
        return found

    times = Times(times_of(work.calls, "forward"), times_of(work.backward_calls, "backward"))
    if work.travel_calls is not None:
        travel = [times_of(work.travel_calls, which) for which in FLOPS_PER_PAIR]
        times = times._replace(travel_forward=travel[0], travel_backward=travel[1])
    return times, measured_us / max(total_us, 1e-9)


def print_table(rows: list[dict]) -> None:
    """Ours and the best other strategy of each mask and number of ranks."""
    for mask in dict.fromkeys(row["mask"] for row in rows):
        cells = []
        for cp in sorted({row["cp"] for row in rows}):
            here = {r["strategy"]: r for r in rows if r["mask"] == mask and r["cp"] == cp}
            for which in ("forward", "backward"):
                others = {name: r[which] for name, r in here.items() if not name.startswith(OURS)}
                best = max(others, key=others.__getitem__)
                ours = here[OURS][which]
                cells.append(f"{ours:4.0f}/{others[best]:4.0f} {best[:16]:16}")
        print(f"{mask:20} " + " ".join(cells), flush=True)
