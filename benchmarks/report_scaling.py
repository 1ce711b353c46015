"""What the results page says of the simulation and of its check."""

from report_tables import distinct, losses, percent, table
from scaling.published import PUBLISHED, PUBLISHED_RANKS

OURS = "magi_jax"


def scaling(stored: dict) -> list[str]:
    """Ours beside the best other strategy, and the ratio."""
    machine, errors = stored["machine"], stored["fit_error"]
    sources = "; ".join(
        f"commit `{run['commit']}`, {run['date']}, `{run['command']}`" for run in stored["kernels"]
    )
    lines = [
        f"Kernel calls were timed on {stored['kernels'][0]['device']} ({sources}):"
        f" {stored['timed_pieces']} of {stored['pieces']} different calls, those of"
        " the slowest ranks first. The others take the time of a fit to the timed ones, which is off by"
        f" {percent(errors['forward'][0])} (median) and {percent(errors['forward'][1])} (95th percentile)"
        f" forward, {percent(errors['backward'][0])} and {percent(errors['backward'][1])} backward."
        f" Links: {machine['near'] / 1e3:.0f} GB/s a GPU inside a node of {machine['node']},"
        f" {machine['far'] / 1e3:.0f} GB/s a GPU between nodes; {machine['near_latency_us']:.0f} and"
        f" {machine['far_latency_us']:.0f} us a transfer. `benchmarks/scaling/model.py` says what hides"
        " behind what. TFLOP/s per GPU of the slowest rank, ours / best other strategy (its name), and the"
        " ratio. Plans are those that `make_plan` chooses for nodes of this size.",
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
        ranks = distinct(stored["rows"], "cp")
        body = []
        for mask in distinct(stored["rows"], "mask"):
            cells = [mask]
            for cp in ranks:
                here = [r for r in stored["rows"] if r["mask"] == mask and r["cp"] == cp]
                ours = next(r[which] for r in here if r["strategy"] == OURS)
                best = max(
                    (r for r in here if not r["strategy"].startswith(OURS)),
                    key=lambda r: r[which],
                )
                ratio = ours / best[which]
                cells.append(f"{ours:.0f} / {best[which]:.0f} ({best['strategy']}) {ratio:.2f}")
                if ratio < 1:
                    behind.append(f"{mask}, {cp} ranks, {which}: {best['strategy']} ({ratio:.2f})")
            body.append(cells)
        lines += ["", f"{which.capitalize()}:", "", *table(["mask", *ranks], body)]
    lines += ["", "Targets:", "", *table(["target", "reached"], targets(stored["rows"]))]
    lines += ["", *beside_published(stored["rows"])]
    return [*lines, "", *losses("Strategies that are ahead, with our share of their rate", behind)]


def timed_shares(rows: list[dict]) -> list[str]:
    """How much of the kernel time was timed, by number of ranks."""
    shares = []
    for cp in distinct(rows, "cp"):
        here = [row for row in rows if row["cp"] == cp]
        ours = [row["measured"] for row in here if row["strategy"] == OURS]
        others = [row["measured"] for row in here if not row["strategy"].startswith(OURS)]
        pair = (percent(sum(x) / len(x)) for x in (ours, others))
        shares.append("{} and {} at {} ranks".format(*pair, cp))
    return [
        f"Of the kernel time of ours and of the others, means over masks, {', '.join(shares)} was timed; the"
        " rest is the fit's. The kernels are those of the commits named above, the plans and layouts those of"
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
            body.append(
                [mask, which, cp, f"{here[OURS]:.0f}", original, f"{others[best]} ({best})"]
            )
    if not body:
        return []
    head = ["mask", "pass", "ranks", "ours", "published original", "published best other"]
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
        ("full and causal: never behind", True, 1.0, tuple(distinct(rows, "cp"))),
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
    return body


def check(stored: dict) -> list[str]:
    """Measured steps beside what the model says of them."""
    head = ["mask", "tokens a rank", "ranks", "transport", "plan", "late queries",
            "forward TFLOP/s", "model's error", "backward TFLOP/s", "model's error"]  # fmt: skip
    rows = stored["rows"]
    body = [
        [
            r["mask"], r["tokens_per_rank"], r["ranks"], r["transport"], r.get("plan", "chosen"),
            "{} / {}".format(*r["late_rows"]) if any(r.get("late_rows", [0])) else "",
            f"{r['forward']:.0f}", f"{100 * r['forward_error']:+.1f} %",
            f"{r['backward']:.0f}", f"{100 * r['backward_error']:+.1f} %",
        ]
        for r in rows
    ]  # fmt: skip
    spans = []
    for which in ("forward", "backward"):
        errors = sorted(abs(r[f"{which}_error"]) for r in rows)
        half, worst = errors[len(errors) // 2], errors[-1]
        spans.append(f"{which} {percent(half)} in the median and {percent(worst)} at most")
    return [
        "Steps of `dist_attention` over real GPUs against the model fed with the same kernels and transfers,"
        " each timed alone. A positive error: the model is slower than what was measured. Without sign they"
        f" are {', '.join(spans)}.",
        "",
        *table(head, body),
    ]
