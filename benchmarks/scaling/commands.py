"""Prepares, times and simulates all problems and strategies."""

import json
import lzma
import multiprocessing
import pathlib
import pickle
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from provenance import save

from scaling.fit import Fit, features, first_fit, fit
from scaling.links import with_other_links
from scaling.machine import Machine, Times, tail_us
from scaling.measure import LONG_VISITS, SLOW, VISITS, call_seconds, time_orders, visits_to
from scaling.model import step_us
from scaling.orders import Order, Posed, calls_of, choose, load_orders, predict, save_orders
from scaling.problems import problem_names, problems
from scaling.work import (
    ALIKE,
    FLOPS_PER_PAIR,
    HEAD_DIM,
    NUM_HEADS,
    OURS,
    Piece,
    Work,
    make_work,
    strategy_names,
)

FAR = np.log(1.25)  # of a time from the fit to the others
DOUBT = 1  # of a call that the fit is right, in calls
ENOUGH = 100  # timed pieces, for a fit that says what to time
PEAK_TFLOPS = 989.0  # of an H100 or H200 in bfloat16


def all_work(args) -> Posed:
    """Works of all problems and strategies; from a file where one is named and there."""
    if args.works and args.works.exists():
        return pickle.loads(lzma.decompress(args.works.read_bytes()))
    posed = Posed({}, {}, {})
    started = time.perf_counter()
    # The largest first, so that no process is left with one of them at the end.
    every = [
        (cp, mask, args.tokens_per_rank)
        for cp in sorted(args.cp, reverse=True)
        for mask in args.masks or problem_names()
    ]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for (cp, mask, _), found in zip(every, pool.map(work_of, every), strict=True):
            for mine, new in zip(posed, found, strict=True):
                mine.update(new)
            used = time.perf_counter() - started
            print(f"cp {cp}, {mask}: {used:.0f} s, {len(posed.pieces)} pieces", flush=True)
    if args.works:
        args.works.parent.mkdir(parents=True, exist_ok=True)
        args.works.write_bytes(lzma.compress(pickle.dumps(posed), preset=1))
    return posed


def work_of(problem: tuple[int, str, int]) -> Posed:
    """Works of all strategies on one problem: number of ranks, mask, tokens of a rank."""
    cp, mask, tokens = problem
    found = Posed({}, {}, {})
    ((_, posed),) = problems(cp, tokens, [mask]).items()
    found.areas[cp, mask] = posed.mask.area
    for name in strategy_names(posed, cp):
        found.works[cp, mask, name] = make_work(name, posed, cp, found.pieces)
    return found


def prepare(args) -> dict[str, Order]:
    """Chooses pieces, writes them in the order of their worth, and says how long they should take."""
    works, pieces, _ = all_work(args)
    # By an earlier run where it timed any of these: kernels may have changed, their order hardly.
    _, timed = read_times([path for path in args.kernels if path.exists()])
    here = [timed[key] for key in set(timed) & set(pieces)]
    enough = all(sum(which in times for times in here) >= ENOUGH for which in FLOPS_PER_PAIR)
    fitted = fit_to(timed, pieces)[0] if enough else first_fit()
    predicted = predict(pieces, fitted)
    steps = {}
    for (cp, mask, name), work in works.items():
        times, _ = kernel_times(work, predicted, {})
        steps[cp, mask, name] = step_us(name, work, times, cp, Machine())
    wanted = choose(works, predicted, steps)
    chosen = {key: Order(pieces[key], tuple(sorted(passes))) for key, passes in wanted.items()}
    save_orders(args.pieces, chosen)
    seconds = sum(
        call_seconds(predicted[which][key], visits_to(chosen[key].piece))
        for key in chosen
        for which in chosen[key].passes
    )
    print(f"{len(chosen)} of {len(pieces)} pieces, about {seconds:.0f} s, in {args.pieces}")
    return chosen


def time_on_gpu(args) -> None:
    """Times the prepared pieces, or prepares them first."""
    chosen = load_orders(args.pieces) if args.pieces.exists() else prepare(args)
    found = time_orders(chosen, args.budget_s, args.implementation)
    if not found:
        raise SystemExit(f"no call was timed in {args.budget_s:g} s: a larger --budget-s is needed")
    content = {
        "what": "microseconds of kernel calls by piece; see scaling.work.Piece.key",
        "implementation": args.implementation or "default",
        "visits": VISITS,
        "visits_to_long": LONG_VISITS,
        "pieces": {
            key: {
                **{which: round(times[which], 1) for which in times["visits"]},
                "visits": {w: [round(us, 1) for us in each] for w, each in times["visits"].items()},
                "matmul": round(times["matmul"], 1),
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
    works, pieces, areas = all_work(args)
    fitted, left_out = fit_to(timed, pieces)
    predicted = predict(pieces, fitted)
    machine = Machine()
    rows, every = [], {}
    for (cp, mask, name), work in works.items():
        times, timed_us = kernel_times(work, predicted, timed)
        every[cp, mask, name] = times
        row: dict = {"cp": cp, "mask": mask, "strategy": name, "rows": work.rows}
        for which, step in step_us(name, work, times, cp, machine).items():
            flops = FLOPS_PER_PAIR[which] * areas[cp, mask] * NUM_HEADS * HEAD_DIM
            kernels = times.kernel_us(which)
            slowest = kernels.argmax()
            row[which] = float(f"{flops / cp / step / 1e6:.5g}")  # also of a CPU
            row[f"{which}_us"] = round(step, 1)
            row[f"{which}_kernel_us"] = round(float(kernels[slowest]), 1)
            row[f"{which}_mean_kernel_us"] = round(float(kernels.mean()), 1)
            share = timed_us.kernel_us(which)[slowest] / max(kernels[slowest], 1e-9)
            row[f"{which}_timed"] = round(float(share), 3)
            row[f"{which}_calls"] = calls_of(work, which).shape[1]
        rows.append(row)
    content = {
        "what": "simulated TFLOP/s per GPU; kernels timed on one GPU, transfers modelled",
        "machine": machine._asdict(),
        "kernels": [{k: v for k, v in source.items() if k != "pieces"} for source in sources],
        "timed_pieces": len(set(timed) & set(pieces)),
        "left_out": left_out,
        "pieces": len(pieces),
        "fit_error": {w: [round(x, 3) for x in e] for w, e in fitted.errors.items()},
        "visits_differ": visits_differ(sources),
        # What every strategy does beside kernels and transfers, and hides behind neither.
        "unhidden_us": {
            "forward": 0.0,
            "backward": round(tail_us(args.tokens_per_rank, machine, parts=False), 1),
        },
        "other_links": with_other_links(works, every),
        "rows": rows,
    }
    save(args.out, args.commit, content)
    print_table(rows)
    if args.pictures:
        from scaling.plot import draw

        draw(rows, args.pictures)


def read_times(paths: list[pathlib.Path]) -> tuple[list[dict], dict[str, dict]]:
    """Result files of `time_on_gpu`, and the times by piece of all that ran on a card at its pace.

    Of several times of a piece that of the last file counts.
    """
    timed: dict[str, dict] = {}
    sources = [json.loads(path.read_text()) for path in paths]
    for source in sources:
        fastest = max(piece["matmul"] for piece in source["pieces"].values())
        kept = {k: p for k, p in source["pieces"].items() if p["matmul"] >= SLOW * fastest}
        left_out = len(source["pieces"]) - len(kept)
        print(f"{left_out} pieces were timed on a slow card and are left out")
        for key, piece in kept.items():
            flops = piece["area"] * piece["heads"] * HEAD_DIM / 1e6
            possible = {
                which: piece[which]
                for which, per_pair in FLOPS_PER_PAIR.items()
                if which in piece and per_pair * flops / piece[which] < PEAK_TFLOPS
            }
            timed[key] = {**timed.get(key, {}), **possible}
    return sources, timed


def visits_differ(sources: list[dict]) -> list[float]:
    """50th and 95th percentile of how far the first two visits to a call lie apart, over their mean; empty if
    none had two.
    """
    twice = [
        us[:2]
        for source in sources
        for piece in source["pieces"].values()
        for us in piece.get("visits", {}).values()
        if len(us) > 1
    ]
    apart = [(max(us) - min(us)) / np.mean(us) for us in twice]
    return [round(float(x), 3) for x in np.percentile(apart, [50, 95])] if apart else []


def fit_to(timed: dict[str, dict], pieces: dict[str, Piece]) -> tuple[Fit, int]:
    """The fit to those of the timed pieces that are among ``pieces``, and how many times were left out.

    What is off by more than a quarter was timed while the host was held up: it is taken out of ``timed``.
    """
    known = {key: features(pieces[key]) for key in timed if key in pieces}
    left_out = 0
    for _ in range(3):
        fitted = fit(
            {
                which: [(known[key], timed[key][which]) for key in known if which in timed[key]]
                for which in FLOPS_PER_PAIR
            }
        )
        far = [
            (key, which)
            for key in known
            for which in FLOPS_PER_PAIR
            if which in timed[key]
            and abs(np.log(fitted.microseconds(known[key], which) / timed[key][which])) > FAR
        ]
        for key, which in far:
            del timed[key][which]
        left_out += len(far)
    return fitted, left_out


def kernel_times(
    work: Work, predicted: dict[str, dict[str, float]], timed: dict[str, dict]
) -> tuple[Times, Times]:
    """Times of all calls of a work, and the same with zeros for what the fit gave.

    The timed calls of a step say how far the fit is off on calls of its kind: it is taken to be off by their
    median on all others, the more of it the more calls say so.
    """

    def times_of(calls: np.ndarray, which: str) -> np.ndarray:
        names, place = np.unique(calls, return_inverse=True)
        measured = np.array([timed.get(key, {}).get(which, 0.0) for key in names])
        by_fit = np.array([predicted[which].get(key, 0.0) for key in names])
        known = measured > 0
        if known.any():
            off = np.median(measured[known] / by_fit[known])
            by_fit *= off ** (known.sum() / (known.sum() + DOUBT))
        us = np.stack([np.where(known, measured, by_fit), measured])
        return us[:, place].reshape(2, *calls.shape)

    def steps_of(calls: np.ndarray, which: str) -> np.ndarray:
        columns = [times_of(calls[:, step], which) for step in range(calls.shape[1])]
        return np.stack(columns, axis=-1)

    every = [steps_of(work.calls, "forward"), steps_of(work.backward_calls, "backward")]
    if work.travel_calls is not None:
        every += [times_of(work.travel_calls, which) for which in FLOPS_PER_PAIR]
    return Times(*(us[0] for us in every)), Times(*(us[1] for us in every))


def print_table(rows: list[dict]) -> None:
    """Ours and the best other strategy of each mask and number of ranks."""
    for mask in dict.fromkeys(row["mask"] for row in rows):
        cells = []
        for cp in sorted({row["cp"] for row in rows}):
            here = {r["strategy"]: r for r in rows if r["mask"] == mask and r["cp"] == cp}
            for which in ("forward", "backward"):
                others = {name: r[which] for name, r in here.items() if not name.startswith(OURS)}
                best = max(others, key=others.__getitem__)
                ours = "/".join(f"{here[name][which]:4.0f}" for name in (OURS, ALIKE))
                cells.append(f"{ours}/{others[best]:4.0f} {best[:16]:16}")
        print(f"{mask:20} " + " ".join(cells), flush=True)
