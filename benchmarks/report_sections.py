"""What the results page says of each stored result, as lines of Markdown."""

from collections.abc import Iterable

from scaling.published import PUBLISHED, PUBLISHED_RANKS

OURS, TWO_LEVEL = "magi_jax", "magi_jax_two_level"


def provenance(stored: dict) -> list[str]:
    """Where the figures come from, in one paragraph."""
    if "commit" not in stored:
        return ["Stored without its machine and commit."]
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    return [
        f"{stored['device']} (host: {stored['host']}); Python {stored['python']}, {versions}; commit"
        f" `{stored['commit']}`, {stored['date']}; `{stored['command']}`."
    ]


def table(head: Iterable[str], rows: Iterable[Iterable]) -> list[str]:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def kernels(stored: dict) -> list[str]:
    """Ours beside the best peer, by head dim and pass; then every peer that is ahead."""
    lines = [
        "64 query heads, 8 kv heads, bfloat16. TFLOP/s of the mask's area, ours / best peer (its name), and"
        " the ratio. The matrix product of 8192 beside them ran at"
        f" {_span(row['matmul'] for row in stored['rows'])} TFLOP/s. FlashAttention 3 and 4 and"
        " MagiAttention's kernels cannot be called from JAX and did not run beside these;"
        " [Kernel notes](kernel_notes.md) has their figures of an earlier run on such a card. At 1024 tokens"
        " the calls of the host take a part of the time.",
    ]
    behind = []
    for head_dim in _distinct(stored["rows"], "head_dim"):
        for which in _distinct(stored["rows"], "pass"):
            rows = [r for r in stored["rows"] if r["head_dim"] == head_dim and r["pass"] == which]
            lengths = sorted(_distinct(rows, "length"))
            cells = {(r["mask"], r["length"]): r for r in rows}
            body = [
                [mask, *(_kernel_cell(cells.get((mask, length))) for length in lengths)]
                for mask in _distinct(rows, "mask")
            ]
            lines += ["", f"Head dim {head_dim}, {which}:", ""]
            lines += table(["mask", *lengths], body)
            behind += [
                f"{r['mask']} {r['length']}, head dim {head_dim}, {which}: {r['best_peer']}"
                f" ({r['ratio']:.2f})"
                for r in rows
                if r.get("ratio", 1.0) < 1.0
            ]
    return [*lines, "", *_losses("Peers that are ahead, with our share of their rate", behind)]


def _kernel_cell(row: dict | None) -> str:
    if row is None:
        return ""
    ours = [rate for name, rate in row["tflops"].items() if name.startswith("ours")]
    if not ours:
        return "failed"
    if "ratio" not in row:
        return f"{max(ours):.0f}"
    peer = row["best_peer"]
    return f"{max(ours):.0f} / {row['tflops'][peer]:.0f} ({peer}) {row['ratio']:.2f}"


def scaling(stored: dict) -> list[str]:
    """Ours beside the best other strategy, and the ratio."""
    machine, errors = stored["machine"], stored["fit_error"]
    kernels = stored["kernels"][0]
    lines = [
        f"Kernel calls were timed on {kernels['device']} (commit `{kernels['commit']}`, {kernels['date']},"
        f" `{kernels['command']}`): {stored['timed_pieces']} of {stored['pieces']} different calls, those of"
        " the slowest ranks first. The others take the time of a fit to the timed ones, which is off by"
        f" {_percent(errors['forward'][0])} (median) and {_percent(errors['forward'][1])} (95th percentile)"
        f" forward, {_percent(errors['backward'][0])} and {_percent(errors['backward'][1])} backward."
        f" Links: {machine['near'] / 1e3:.0f} GB/s a GPU inside a node of {machine['node']},"
        f" {machine['far'] / 1e3:.0f} GB/s a GPU between nodes; {machine['near_latency_us']:.0f} and"
        f" {machine['far_latency_us']:.0f} us a transfer. `benchmarks/scaling/model.py` says what hides"
        " behind what. TFLOP/s per GPU of the slowest rank, ours / best other strategy (its name), and the"
        " ratio. In brackets: ours with casts and reduces in two levels (`magi_jax.comm.two_level`), which"
        " `dist_attention` does not take yet; ratios and targets are without them.",
        "",
        "What favours the others: gradients of keys travel in float32 for ours, its default, and in bfloat16"
        " for them; the backward pass of rings keeps all keys and values in memory and sends gradients alone;"
        " `hybrid` gives a rank up to 1.5 times the mean number of tokens, for which the rest of a model"
        " would pay, and its gathers hide behind the level before.",
        "",
        *timed_shares(stored["rows"]),
        "",
        "![forward](pictures/scaling_forward.png)",
        "![backward](pictures/scaling_backward.png)",
    ]
    behind = []
    for which in ("forward", "backward"):
        ranks = _distinct(stored["rows"], "cp")
        body = []
        for mask in _distinct(stored["rows"], "mask"):
            cells = [mask]
            for cp in ranks:
                here = [r for r in stored["rows"] if r["mask"] == mask and r["cp"] == cp]
                ours = next(r[which] for r in here if r["strategy"] == OURS)
                best = max(
                    (r for r in here if not r["strategy"].startswith(OURS)),
                    key=lambda r: r[which],
                )
                two = [r[which] for r in here if r["strategy"] == TWO_LEVEL]
                ratio = ours / best[which]
                mine = f"{ours:.0f} [{two[0]:.0f}]" if two else f"{ours:.0f}"
                cells.append(f"{mine} / {best[which]:.0f} ({best['strategy']}) {ratio:.2f}")
                if ratio < 1:
                    behind.append(f"{mask}, {cp} ranks, {which}: {best['strategy']} ({ratio:.2f})")
            body.append(cells)
        lines += ["", f"{which.capitalize()}:", "", *table(["mask", *ranks], body)]
    lines += ["", "Targets:", "", *table(["target", "reached"], targets(stored["rows"]))]
    lines += ["", *beside_published(stored["rows"])]
    return [*lines, "", *_losses("Strategies that are ahead, with our share of their rate", behind)]


def timed_shares(rows: list[dict]) -> list[str]:
    """How much of the kernel time was timed, by number of ranks."""
    shares = []
    for cp in _distinct(rows, "cp"):
        here = [row for row in rows if row["cp"] == cp]
        ours = [row["measured"] for row in here if row["strategy"] == OURS]
        others = [row["measured"] for row in here if not row["strategy"].startswith(OURS)]
        pair = (_percent(sum(x) / len(x)) for x in (ours, others))
        shares.append("{} and {} at {} ranks".format(*pair, cp))
    return [
        f"Of the kernel time of ours and of the others, means over masks, {', '.join(shares)} was timed; the"
        " rest is the fit's. The kernels are those of the commit named above, the plans and layouts those of"
        " the commit of this section."
    ]


def beside_published(rows: list[dict]) -> list[str]:
    """Ours at the largest number of ranks beside published rates of the original and of its rivals."""
    body = []
    for (mask, which), curves in PUBLISHED.items():
        for cp in sorted({row["cp"] for row in rows} & {PUBLISHED_RANKS[0], PUBLISHED_RANKS[-1]}):
            here = {r["strategy"]: r[which] for r in rows if (r["mask"], r["cp"]) == (mask, cp)}
            if OURS not in here:
                continue
            at = PUBLISHED_RANKS.index(cp)
            original = max(rates[at] for name, rates in curves.items() if name.startswith("magi"))
            others = {n: rates[at] for n, rates in curves.items() if not n.startswith("magi")}
            best = max(others, key=others.__getitem__)
            two = f"{here[TWO_LEVEL]:.0f}" if TWO_LEVEL in here else ""
            body.append(
                [mask, which, cp, f"{here[OURS]:.0f}", two, original, f"{others[best]} ({best})"]
            )
    if not body:
        return []
    head = ["mask", "pass", "ranks", "ours", "in two levels", "published original",
            "published best other"]  # fmt: skip
    return [
        "Beside published rates on H100s, read off the charts of MagiAttention v1.1 (about 5 TFLOP/s either"
        " way), whose packings have lengths of their own:",
        "",
        *table(head, body),
    ]


def targets(rows: list[dict]) -> list[list[str]]:
    """What the simulation was to show, and what it shows, of the masks and ranks that are there."""
    by = {(r["strategy"], r["mask"], r["cp"]): r for r in rows}
    wanted = (("varlen_causal", "forward", 500), ("varlen_full", "forward", 550),
              ("varlen_causal", "backward", 430))  # fmt: skip
    body = []

    def best_other(mask: str, cp: int, which: str) -> float:
        return max(
            row[which]
            for (name, *problem), row in by.items()
            if problem == [mask, cp] and not name.startswith(OURS)
        )

    for mask, which, rate in wanted:
        if row := by.get((OURS, mask, 64)):
            body.append([f"{mask} {which} at 64 ranks: {rate} TFLOP/s", f"{row[which]:.0f}"])
    for mask in ("full", "causal"):
        for which in ("forward", "backward"):
            if (row := by.get((OURS, mask, 64))) and f"{which}_kernel_us" in row:
                share = row[f"{which}_kernel_us"] / row[f"{which}_us"]
                body.append(
                    [f"{mask} {which} at 64 ranks: 0.97 of its kernels alone", f"{share:.3f}"]
                )
    for title, regular, least, ranks in (
        ("irregular masks at 32 and 64 ranks: 1.3 times the best other", False, 1.3, (32, 64)),
        ("full and causal: never behind", True, 1.0, tuple(_distinct(rows, "cp"))),
    ):
        ratios = {
            (mask, cp, which): by[OURS, mask, cp][which] / best_other(mask, cp, which)
            for (name, mask, cp) in by
            if name == OURS and (mask in ("full", "causal")) == regular and cp in ranks
            for which in ("forward", "backward")
        }
        if ratios:
            reached = sum(ratio >= least for ratio in ratios.values())
            worst = min(ratios, key=ratios.__getitem__)
            text = f"{reached} of {len(ratios)} cells; least {ratios[worst]:.2f}"
            body.append([title, f"{text} ({worst[0]}, {worst[1]} ranks, {worst[2]})"])
    two_levels = [
        f"{mask} {which} {by[TWO_LEVEL, mask, 64][which]:.0f}"
        for mask, which, _ in wanted
        if (TWO_LEVEL, mask, 64) in by
    ]
    if two_levels:
        body.append(["the first three with transfers in two levels", ", ".join(two_levels)])
    return body


def check(stored: dict) -> list[str]:
    """Measured steps beside what the model says of them."""
    head = ["mask", "tokens a rank", "ranks", "transport", "forward TFLOP/s", "model's error",
            "backward TFLOP/s", "model's error"]  # fmt: skip
    rows = stored["rows"]
    body = [
        [
            r["mask"], r["tokens_per_rank"], r["ranks"], r["transport"],
            f"{r['forward']:.0f}", f"{100 * r['forward_error']:+.1f} %",
            f"{r['backward']:.0f}", f"{100 * r['backward_error']:+.1f} %",
        ]
        for r in rows
    ]  # fmt: skip
    spans = []
    for which in ("forward", "backward"):
        errors = sorted(abs(r[f"{which}_error"]) for r in rows)
        half, worst = errors[len(errors) // 2], errors[-1]
        spans.append(f"{which} {_percent(half)} in the median and {_percent(worst)} at most")
    return [
        "Steps of `dist_attention` over real GPUs against the model fed with the same kernels and transfers,"
        " each timed alone. A positive error: the model is slower than what was measured. Without sign they"
        f" are {', '.join(spans)}.",
        "",
        *table(head, body),
    ]


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
        " (95th percentile) in ms.",
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
        "",
        *table(head, body),
        "",
        *_losses("Where others are ahead, with their time over ours", behind),
    ]


def memory(stored: dict) -> list[str]:
    """Peaks by length, attention and policy."""
    ways = list(dict.fromkeys((r["attention"], r["policy"]) for r in stored["rows"]))
    lengths = sorted(_distinct(stored["rows"], "length"))
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
        f" {stored['limit_gib']:.0f} GiB. Policy: what `jax.checkpoint` keeps.",
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
    ]


def _losses(title: str, entries: list[str]) -> list[str]:
    if not entries:
        return [f"{title}: none."]
    return [f"{title}:", "", *(f"- {entry}" for entry in entries)]


def _distinct(rows: list[dict], key: str) -> list:
    return list(dict.fromkeys(row[key] for row in rows))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _span(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.0f} to {max(values):.0f}"
