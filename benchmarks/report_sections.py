"""What the results page says of each stored result but the simulation, as lines of Markdown."""

import re

from report_tables import distinct, losses, span, table


def kernels(stored: dict) -> list[str]:
    """Ours beside the peers, by head dim and pass; then every peer that is ahead."""
    rates = dict.fromkeys(name for row in stored["rows"] for name in row["tflops"])
    peers = [name for name in rates if not name.startswith("ours")]
    lines = [
        "64 query heads, 8 kv heads, bfloat16. TFLOP/s of the mask's area,"
        f" {' / '.join(['ours', *peers])}, and our ratio to the best peer; ours alone where no peer has a"
        " form of the mask, or room for it. The matrix product of 8192 beside them ran at"
        f" {span(row['matmul'] for row in stored['rows'])} TFLOP/s. Ours and the peers took turns, calls back"
        " to back in each, at a pace that the card keeps up; passes that take less than about a millisecond"
        " are repeated inside one program, ours and peers alike.",
        *(["", stored["note"]] if "note" in stored else []),
    ]
    behind = []
    for head_dim in distinct(stored["rows"], "head_dim"):
        for which in distinct(stored["rows"], "pass"):
            rows = [r for r in stored["rows"] if r["head_dim"] == head_dim and r["pass"] == which]
            lengths = sorted(distinct(rows, "length"))
            cells = {(r["mask"], r["length"]): r for r in rows}
            body = [
                [mask, *(_kernel_cell(cells.get((mask, n)), peers) for n in lengths)]
                for mask in distinct(rows, "mask")
            ]
            lines += ["", f"Head dim {head_dim}, {which}:", ""]
            lines += table(["mask", *lengths], body)
            behind += [
                f"{r['mask']} {r['length']}, head dim {head_dim}, {which}: {r['best_peer']}"
                f" ({r['ratio']:.2f})"
                for r in rows
                if r.get("ratio", 1.0) < 1.0
            ]
    ahead = losses("Peers that are ahead, with our share of their rate", behind)
    return [*lines, "", *ahead, *_refusals(stored["rows"])]


def kernel_peers(stored: dict) -> list[str]:
    """Ours beside each peer, by mask and length, a cell for all passes; then every peer that is ahead."""
    rows = stored["rows"]
    names = list(dict.fromkeys(name for row in rows for name in (*row["tflops"], *row["errors"])))
    passes = distinct(rows, "pass")
    body = []
    for mask, length in dict.fromkeys((row["mask"], row["length"]) for row in rows):
        here = {r["pass"]: r["tflops"] for r in rows if (r["mask"], r["length"]) == (mask, length)}
        body.append([mask, length, *(_each_pass(name, passes, here) for name in names)])
    behind = [
        f"{row['mask']} {row['length']}, {row['pass']}: {row['best_peer']} ({row['ratio']:.2f})"
        for row in rows
        if row.get("ratio", 1.0) < 1.0
    ]
    return [
        f"TFLOP/s at head dim 128, {' / '.join(passes)}, of every peer that takes a mask, in turns as above.",
        *(["", stored["note"]] if "note" in stored else []),
        "",
        *table(["mask", "tokens", *names], body),
        "",
        *losses("Peers that are ahead, with our share of their rate", behind),
        *_refusals(rows),
    ]


def _each_pass(name: str, passes: list[str], rates: dict[str, dict]) -> str:
    """Rates of all passes, or nothing where there is none."""
    each = [f"{rates[p][name]:.0f}" if name in rates.get(p, {}) else "-" for p in passes]
    return " / ".join(each) if set(each) != {"-"} else ""


def _refusals(rows: list[dict]) -> list[str]:
    """Who refused a mask: by name where there is no form of it, and with the message where it is another."""
    without: dict[str, list[str]] = {}
    others: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, error in row["errors"].items():
            if error.endswith(f"has no form of {row['mask']}"):
                if row["mask"] not in without.setdefault(name, []):
                    without[name].append(row["mask"])
            else:
                others.setdefault(f"{name}: {error}", {})[f"{row['mask']} {row['length']}"] = None
    lines = []
    if without:
        each = [f"{name} of {', '.join(masks)}" for name, masks in without.items()]
        lines += ["", f"No form of a mask has: {'; '.join(each)}."]
    each = [f"{error} ({', '.join(places)})" for error, places in others.items()]
    return [*lines, *(["", *losses("Refused", each)] if each else [])]


def _kernel_cell(row: dict | None, peers: list[str]) -> str:
    if row is None:
        return ""
    ours = [rate for name, rate in row["tflops"].items() if name.startswith("ours")]
    if not ours:
        return "failed"
    if "ratio" not in row:
        return f"{max(ours):.0f}"
    rates = (row["tflops"].get(peer) for peer in peers)
    each = (f"{rate:.0f}" if rate else "-" for rate in rates)
    return f"{' / '.join([f'{max(ours):.0f}', *each])} {row['ratio']:.2f}"


def compiles(stored: dict) -> list[str]:
    """Compilations and times by way of giving the mask."""
    least, middle, most = stored["documents"]
    documents = f"{least} to {most} documents, median {middle:.0f}"
    heads = "{}:{} heads".format(*stored["heads"])
    lines = [
        f"{stored['packings']} packings of functions and classes of the Python library,"
        f" {stored['seq_len']} tokens, {documents};"
        f" {heads} of {stored['head_dim']}, {stored['dtype']}, {stored['devices']} device(s). Planning is"
        " what is done on the host for each packing, by the clock and in processor time; times are median"
        " (95th percentile) in ms. A step of `constant`, whose masks are constants, compiles.",
        *(["", stored["note"]] if "note" in stored else []),
        "",
    ]
    body = []
    for way, found in stored["ways"].items():
        if "missing" in found:
            body.append([way, found["missing"], "", "", "", ""])
            continue
        plan, step = found["planning_ms"], found["step_ms"]
        processor = found.get("planning_processor_ms", {"median": float("nan")})
        body.append([
            way, f"{found['compiles']} in {found['packings']}", f"{found['first_step_ms']:.0f}",
            f"{plan['median']:.1f} ({plan['p95']:.1f})", f"{processor['median']:.1f}",
            f"{step['median']:.1f} ({step['p95']:.1f})",
        ])  # fmt: skip
    head = ["way", "compilations", "first step", "planning", "its processor time", "step"]
    return [*lines, *table(head, body)]


def cpu_kernels(stored: dict) -> list[str]:
    """Milliseconds and ratios by mask and pass."""
    peers = list(dict.fromkeys(name for row in stored["rows"] for name in row["ratio"]))
    body, behind = [], []
    for row in stored["rows"]:
        cells = [row["mask"], f"{row['area'] / 1e6:.2f}", row["dtype"], row["pass"]]
        cells.append(f"{row['ms']['ours']:.0f}")
        for peer in peers:
            there = peer in row["ratio"]
            cells.append(f"{row['ms'][peer]:.0f} ({row['ratio'][peer]:.1f}x)" if there else "")
            if there and row["ratio"][peer] < 1:
                behind.append(
                    f"{row['mask']}, {row['dtype']}, {row['pass']}: {peer} ({row['ratio'][peer]:.2f})"
                )
        body.append(cells)
    head = ["mask", "area / 10^6", "dtype", "pass", "ours ms", *(f"{peer} ms" for peer in peers)]
    return [
        f"{stored['length']} tokens, {stored['heads']} heads of {stored['head_dim']},"
        f" {stored['kernels']} kernels; best of {stored['repeats']} turns. In brackets the time over ours.",
        *(["", stored["note"]] if "note" in stored else []),
        "",
        *table(head, body),
        "",
        *losses("Where others are ahead, with their time over ours", behind),
    ]


def memory(stored: dict) -> list[str]:
    """Peaks by length, attention and policy."""
    ways = list(dict.fromkeys((r["attention"], r["policy"]) for r in stored["rows"]))
    lengths = sorted(distinct(stored["rows"], "length"))
    peaks = {(r["attention"], r["policy"], r["length"]): r for r in stored["rows"]}
    body = []
    for attention, policy in ways:
        cells = [attention, policy]
        for length in lengths:
            row = peaks.get((attention, policy, length))
            if row and "error" in row:
                cells.append("refused")
                continue
            ran = (
                f" (allocator {row['allocator_gib']:.1f})" if row and "allocator_gib" in row else ""
            )
            cells.append(f"{row['gib']:.1f}{ran}" if row else "")
        body.append(cells)
    heads = "{}:{} heads".format(*stored["heads"])
    return [
        f"GiB of a training step of {stored['layers']} layers, {heads} of {stored['head_dim']},"
        f" {stored['dtype']}, one causal sequence, by its tokens; sweeps end where a step exceeds"
        f" {stored['limit_gib']:.0f} GiB. Policy: what `jax.checkpoint` keeps. By XLA's analysis of the"
        " program; in brackets what its allocator held when the step ran.",
        *(["", stored["note"]] if "note" in stored else []),
        "",
        *table(["attention", "policy", *lengths], body),
    ]


def planner(stored: dict) -> list[str]:
    """Means of the planner's benchmark."""
    body = [
        [
            key.removeprefix("cp"),
            f"{found['summary']['rows_against_min_heap']:.2f}",
            f"{found['summary']['node_rows_against_min_heap']:.2f}",
            f"{found['summary']['worst_imbalance']:.3f}",
            f"{found['summary']['mean_dispatch_ms']:.1f}",
            f"{found['summary']['mean_plan_ms']:.1f}",
        ]
        for key, found in stored.items()
        if key.startswith("cp") and found.get("summary")
    ]
    head = ["ranks", "rows / min-heap", "node rows / min-heap", "worst imbalance", "dispatch ms",
            "plan ms"]  # fmt: skip
    return [
        f"Effort {stored['effort']}, seeds {stored['seeds']}; `docs/planner.md` explains the columns.",
        "",
        *table(head, body),
        "",
        "Targets at 64 ranks, over all seeds:",
        "",
        *table(
            ["what", "reached", "limit"],
            [
                [t["what"], f"{t['reached']:.3f}", f"{t['limit']:g}"]
                for t in stored.get("targets", [])
            ],
        ),
        *_bad_input(stored.get("bad_input", [])),
    ]


def _bad_input(rows: list[dict]) -> list[str]:
    """What masks that nobody plans for are answered with."""
    if not rows:
        return []
    body = [
        [
            row["what"],
            f"{row['plan_ms']:.1f}",
            f"{row['limit_ms']:g}",
            f"imbalance {row['imbalance']:.4f}" if row["error"] is None else row["error"],
            "yes" if row["reached"] else "no",
        ]
        for row in rows
    ]
    head = ["bad input, 64 ranks", "ms", "limit", "plan or error", "reached"]
    return ["", *table(head, body)]


def sanitizers(stored: dict) -> list[str]:
    """Errors and hazards by sanitizer and kernels, called directly and by JAX, then each kind of report."""
    reports: dict[str, dict[str, int]] = {}
    groups: dict[tuple, dict[str, list[dict]]] = {}
    for row in stored["rows"]:
        way = "directly" if row["problem"] else "by JAX"
        groups.setdefault((row["tool"], row["path"]), {}).setdefault(way, []).append(row)
        for kind, count in row["kinds"].items():
            found = reports.setdefault(f"{row['tool']}: {_by_function(kind)}", {})
            found[row["path"]] = found.get(row["path"], 0) + count
    alike: dict[tuple, list[str]] = {}  # kernels of which a sanitizer says the same
    for (tool, path), ways in groups.items():
        found = tool, *(_processes(ways.get(way, [])) for way in ("directly", "by JAX"))
        alike.setdefault(found, []).append(path)
    body = [[tool, ", ".join(paths), *cells] for (tool, *cells), paths in alike.items()]
    lines = [
        f"{text} ({', '.join(f'{path} {n}' for path, n in found.items())})"
        for text, found in reports.items()
    ]
    return [
        f"compute-sanitizer {stored['sanitizer'].removeprefix('Version ')}. Directly: one process for each"
        " problem of `tests/sanitize/device_problems.py`, with buffers of the exact size; by JAX: cases of"
        " `tests/fuzz`. A cell has the processes that ended well, whose results were right, and errors. An"
        " error of racecheck is a pair of places; `docs/kernels/backward_measured.md` says what orders them.",
        "",
        *table(["sanitizer", "kernels", "directly", "by JAX"], body),
        "",
        *losses("What was reported, and how often", lines),
    ]


def _processes(rows: list[dict]) -> str:
    """How many processes ended, were right, and what they reported."""
    if not rows:
        return ""
    ended = sum(row["ended"] == "0" for row in rows)
    others = sorted({row["ended"] for row in rows} - {"0"})
    named = f" (others: {', '.join(others)})" if others else ""
    right = sum(not row["wrong"] for row in rows if row["ended"] == "0")
    survived = ", ".join(row["survived"] for row in rows if row["survived"])
    errors = sum(row["errors"] or 0 for row in rows)
    return f"ended {ended} of {len(rows)}{named}, right {survived or f'{right} of {ended}'}, errors {errors}"


def _by_function(kind: str) -> str:
    """A race by its two functions, the writing one first; others as they are."""
    if not kind.startswith("race: "):
        return kind
    accesses = re.sub(r" [\w.]+:\d+", "", kind.removeprefix("race: ")).split(", ")
    return "race: " + ", ".join(sorted(accesses, reverse=True))
