"""The first thing on the results page: what each section shows, in a line, losses included."""

import json
import pathlib
import statistics
from collections.abc import Callable

from report_ceilings import ratios
from report_tables import distinct, table
from report_targets import in_short


def summary(results: pathlib.Path, files: dict[str, tuple[str, str]]) -> list[str]:
    """A line for each result that is stored.

    Args:
        results: folder of the result files.
        files: title of its section by name of a file, and who writes its line.
    """
    body = []
    for name, (title, kind) in files.items():
        path = results / name
        if path.exists():
            lines = LINES[kind](json.loads(path.read_text()))
            body += [["", text] for text in lines]
            if lines:
                body[-len(lines)][0] = f"[{title}](#{_anchor(title)})"
    return table(["section", "what it shows"], body) if body else []


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return "-".join(kept.split())


def kernels(stored: dict) -> list[str]:
    """In how many cells ours is ahead of every peer beside it, and where it is least so."""
    rows = [row for row in stored["rows"] if "ratio" in row]
    if not rows:
        return []
    names = dict.fromkeys(
        name for row in rows for name in row["tflops"] if not name.startswith("ours")
    )
    ahead = sum(row["ratio"] >= 1 for row in rows)
    least = min(rows, key=lambda row: row["ratio"])
    return [
        f"ahead of {', '.join(names)} in {ahead} of {len(rows)} cells; our rate over the best of them:"
        f" {_spread([row['ratio'] for row in rows])}; least in {least['mask']} {least['length']},"
        f" {least['pass']}"
    ]


def each_peer(stored: dict) -> list[str]:
    """In how many cells of each pass ours is ahead: of all peers, and of each of them."""
    lines = []
    for which in distinct(stored["rows"], "pass"):
        rows = [row for row in stored["rows"] if row["pass"] == which and "ratio" in row]
        if not rows:
            continue
        names = dict.fromkeys(name for row in rows for name in row["tflops"] if name != "ours")
        each = []
        for name in names:
            ratios = [r["tflops"]["ours"] / rate for r in rows if (rate := r["tflops"].get(name))]
            each.append(
                f"{name} in {sum(r >= 1 for r in ratios)} of {len(ratios)} ({_spread(ratios)})"
            )
        behind = [row for row in rows if row["ratio"] < 1]
        masks = []
        for mask in distinct(behind, "mask"):
            found = [row["ratio"] for row in behind if row["mask"] == mask]
            every = sum(row["mask"] == mask for row in rows)
            masks.append(f"{mask} {len(found)} of {every} (least {min(found):.2f})")
        lines.append(
            f"{which}: ahead of all in {len(rows) - len(behind)} of {len(rows)} cells;"
            f" of {', of '.join(each)}{'; behind the best in ' if masks else ''}{', '.join(masks)}"
        )
    return lines


def rivals(stored: dict) -> list[str]:
    """Ours over the best other strategy, on real devices."""
    parts = []
    for mask, heads in dict.fromkeys((r["mask"], r["heads"]) for r in stored["rows"]):
        here = [r for r in stored["rows"] if (r["mask"], r["heads"]) == (mask, heads)]
        ratios = [
            here[0][which] / max(r[which] for r in here[1:] if which in r)
            for which in ("forward", "backward")
        ]
        parts.append(f"{mask} {heads} {ratios[0]:.2f} and {ratios[1]:.2f}")
    return [f"our rate over the best other strategy, forward and backward: {'; '.join(parts)}"]


def distributed(stored: dict) -> list[str]:
    """What is left of the rate of one GPU."""
    rows = [r for r in stored["rows"] if "forward_ratio" in r]
    return [
        f"{heads} heads: rate over that of one GPU forward"
        f" {_spread([r['forward_ratio'] for r in rows if r['heads'] == heads])}, backward"
        f" {_spread([r['backward_ratio'] for r in rows if r['heads'] == heads])}"
        for heads in distinct(rows, "heads")
    ]


def scaling(stored: dict) -> list[str]:
    """What was aimed at, by default, and how many cells are ahead of all others."""
    rows = stored["rows"]
    cells = list(dict.fromkeys((r["mask"], r["cp"]) for r in rows))
    values = list(ratios(rows, cells)[0].values())
    return [
        *in_short(rows),
        f"ahead of all others in {sum(r >= 1 for r in values)} of {len(values)} cells, within 4 % of the best"
        f" in {sum(0.96 <= r < 1 for r in values)} more; {_spread(values)}",
    ]


def check(stored: dict) -> list[str]:
    """How far the model is off, and to which side."""
    parts = []
    for which in ("forward", "backward"):
        errors = [r[f"{which}_error"] for r in stored["rows"]]
        middle = statistics.median(errors)
        parts.append(
            f"{which} {100 * abs(middle):.0f} % too {'fast' if middle < 0 else 'slow'} in the median"
            f" ({100 * min(errors):+.0f} to {100 * max(errors):+.0f} %)"
        )
    return [f"steps of {len(stored['rows'])} plans over two GPUs: the model is {', '.join(parts)}"]


def granted(stored: dict) -> list[str]:
    """How far the model is off for ours and for each other strategy."""
    errors: dict[str, list[float]] = {}
    for row in stored["rows"]:
        errors.setdefault(row["strategy"], []).extend(
            100 * (row["model"][which] / row["ran"][which] - 1) for which in row["ran"]
        )
    each = [f"{name} {min(found):+.0f} to {max(found):+.0f} %" for name, found in errors.items()]
    return [f"the model's rates over those that ran on two GPUs: {', '.join(each)}"]


def compiles(stored: dict) -> list[str]:
    """Compilations and the median step by way of giving the mask."""
    ways = [
        f"{name} {found['compiles']} in {found['packings']} ({found['step_ms']['median']:.1f} ms)"
        for name, found in stored["ways"].items()
        if "compiles" in found
    ]
    return [f"compilations (and the median step): {', '.join(ways)}"]


def cpu_kernels(stored: dict) -> list[str]:
    """Times of others over ours."""
    parts = []
    for peer in dict.fromkeys(name for row in stored["rows"] for name in row["ratio"]):
        ratios = [row["ratio"][peer] for row in stored["rows"] if peer in row["ratio"]]
        parts.append(f"{peer} {_spread(ratios, 1)}")
    return [f"times over ours: {'; '.join(parts)}"]


def _spread(values: list[float], digits: int = 2) -> str:
    """Least, median and most."""
    middle = statistics.median(values)
    least, middle, most = (f"{x:.{digits}f}" for x in (min(values), middle, max(values)))
    return f"{least} to {most}, median {middle}"


LINES: dict[str, Callable[[dict], list[str]]] = {
    "kernels": kernels,
    "each_peer": each_peer,
    "rivals": rivals,
    "distributed": distributed,
    "scaling": scaling,
    "check": check,
    "granted": granted,
    "compiles": compiles,
    "cpu_kernels": cpu_kernels,
}
