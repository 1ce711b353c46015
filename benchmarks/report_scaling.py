"""What the results page says of the simulation and of its check."""

import statistics

from report_ceilings import AIM, ALIKE, OURS, ceilings, compared
from report_tables import distinct, losses, percent, table
from report_targets import targets
from scaling.published import PUBLISHED, PUBLISHED_RANKS


def scaling(stored: dict) -> list[str]:
    """Targets, ours in two ways beside the best other strategy, who is ahead and why, and how it was made."""
    rows = stored["rows"]
    lines = [
        "TFLOP/s per GPU of the slowest rank, 8,192 tokens a rank, 64:8 heads of 128, bfloat16: kernel calls"
        " of each rank timed on one GPU, transfers modelled, since more than two GPUs were not to be had; the"
        " next section says how far that is off. All strategies run the kernel of this library.",
        "",
        "Ours is the default: plans made in milliseconds for each batch, gradients of keys sent in float32,"
        " keys fetched again in the backward pass. The others are granted more: gradients in bfloat16, all"
        " keys and values of the forward pass kept in memory (rings), layouts that nobody searches for. Alike"
        ' is ours with the same: `DistOptions(reduce_dtype="bfloat16", keep_remote_kv=True)`, and plans made'
        ' ahead with `effort="high"` (seconds of a background worker).',
        "",
        "The others: `ulysses` (heads; kv heads are repeated where ranks are more, and sent so), `ring`,"
        " `allgather`, `usp` (heads inside a node, a ring across nodes) and `loongtrain` (a ring of rings),"
        " with each sequence or each document in zigzag; `hybrid` keeps a document on 1, 2, 4, ... ranks, as"
        " many as its tokens and its area ask for, with up to 1.5 times the mean tokens on a rank;"
        " `hybrid_even2` and `hybrid_even4` on 2 and 4 times as many, which balances ranks better, with 1.05"
        " times the tokens at most. Left out is who would cut a mask into more than 200,000 slices.",
        "",
        *table(["target", "ours", "alike"], targets(rows)),
    ]
    ranks = sorted(distinct(rows, "cp"))
    for which in ("forward", "backward"):
        body = [
            [mask, *(_cell(*compared(rows, mask, cp, which), which) for cp in ranks)]
            for mask in distinct(rows, "mask")
        ]
        lines += ["", f"### {which.capitalize()}, by ranks", ""]
        lines += ["Ours, alike / best other strategy (its name), and the ratios of both.", ""]
        lines += [*table(["mask", *ranks], body), "", f"![{which}](pictures/scaling_{which}.png)"]
    title = (
        "Strategies that are ahead of the default, with its share of their rate and that of alike"
    )
    lines += ["", "### Who is ahead", "", *losses(title, _behind(rows))]
    lines += ["", *fullest_ranks(rows), "", *ceilings(stored), "", *other_links(stored), ""]
    lines += beside_published(rows)
    return [*lines, "", "### How these figures were made", "", *how(stored)]


def _cell(ours: list[dict], best: dict, which: str) -> str:
    rates = ", ".join(f"{row[which]:.0f}" for row in ours)
    ratios = ", ".join(f"{row[which] / best[which]:.2f}" for row in ours)
    return f"{rates} / {best[which]:.0f} ({best['strategy']}) {ratios}"


def _behind(rows: list[dict]) -> list[str]:
    found = []
    for which in ("forward", "backward"):
        for mask in distinct(rows, "mask"):
            for cp in sorted(distinct(rows, "cp")):
                ours, best = compared(rows, mask, cp, which)
                ratios = ", ".join(f"{row[which] / best[which]:.2f}" for row in ours)
                if ours[0][which] < best[which]:
                    found.append(f"{mask}, {cp} ranks, {which}: {best['strategy']} ({ratios})")
    return found


def how(stored: dict) -> list[str]:
    """Which calls were timed, what the others take, and the links."""
    machine, errors = stored["machine"], stored["fit_error"]
    sources = "; ".join(
        f"commit `{run['commit']}`, {run['date']}, `{run['command']}`" for run in stored["kernels"]
    )
    apart = stored.get("visits_differ")
    often = stored["kernels"][0].get("visits_to_long")
    long = f" (the long ones over whole masks {often} times)" if often else ""
    return [
        f"Kernel calls were timed on {stored['kernels'][0]['device']} ({sources}):"
        f" {stored['timed_pieces']} of {stored['pieces']} different calls: of ours and of the others that"
        " come within a tenth of the best other those of the rank that should be the slowest, then of the"
        " four slowest, and so on as far as the time sufficed, on a card that did not rest, calls of like"
        " rates one after the other"
        + (
            f"; each was visited twice{long}, and the first two lie"
            f" {percent(apart[0])} apart (median; 95th percentile {percent(apart[1])})."
            if apart
            else "."
        )
        + f" {stored.get('left_out', 0)} times that are off by more than a quarter from the fit to the others"
        " are left out: the host was held up, or the pace of the card another. All other calls take the time"
        " of a fit to the timed ones, which is off by"
        f" {percent(errors['forward'][0])} (median) and {percent(errors['forward'][1])} (95th percentile)"
        f" forward, {percent(errors['backward'][0])} and {percent(errors['backward'][1])} backward, scaled by"
        " what the timed calls of the same step of the same strategy say of it.",
        "",
        *timed_shares(stored["rows"]),
        "",
        f"Links: {machine['near'] / 1e3:.0f} GB/s a GPU inside a node of {machine['node']},"
        f" {machine['far'] / 1e3:.0f} GB/s a GPU between nodes; {machine['near_latency_us']:.0f} and"
        f" {machine['far_latency_us']:.0f} us a transfer. `benchmarks/scaling/model.py` says what hides"
        " behind what. Kernels are not slowed by transfers beside them: with 8 of 132 SMs lent for as long,"
        " steps of ours at 64 ranks would take 0 to 3 % longer, those of the hybrids 0 to 4 %. Plans are"
        " those that `make_plan` chooses for nodes of this size.",
        *(["", stored["note"]] if "note" in stored else []),
    ]


def fullest_ranks(rows: list[dict]) -> list[str]:
    """What favours the hybrid strategy, with the most tokens that it gives a rank."""
    most = max((r["rows"] for r in rows if r["strategy"] == "hybrid" and "rows" in r), default=0)
    held = max((r["rows"] for r in rows if r["strategy"] == OURS and "rows" in r), default=0)
    if not most or not held:
        return []
    return [
        f"What still favours the others: `hybrid` gives a rank up to {most} tokens where ours gives each"
        f" {held}, so that projections and MLPs would take {most / held:.2f} times as long there, and all"
        " others would wait. The hybrids' gathers hide behind the documents before, and bringing rows into"
        " the order of documents costs them nothing here."
    ]


def other_links(stored: dict) -> list[str]:
    """How the counts change with the links."""
    every = stored.get("other_links", [])
    body = [
        [
            links["what"],
            *(
                f"{sum(ratio >= AIM for ratio in links[name])} of {len(links[name])}, median"
                f" {statistics.median(links[name]):.2f}"
                for name in (OURS, ALIKE)
                if name in links
            ),
        ]
        for links in every
    ]
    if not body:
        return []
    head = ["links", f"cells of at least {AIM} beside all others", "alike"]
    return [
        "The same masks and ranks over other links, with the same plans:",
        "",
        *table(head, body),
    ]


def timed_shares(rows: list[dict]) -> list[str]:
    """Of how many figures of the tables all calls were timed."""
    shares: list[float] = []
    for cp in sorted(distinct(rows, "cp")):
        for mask in distinct(rows, "mask"):
            for which in ("forward", "backward"):
                ours, best = compared(rows, mask, cp, which)
                shares += [row[f"{which}_timed"] for row in (*ours, best)]
    whole = sum(share > 0.999 for share in shares)
    half = sum(share > 0.5 for share in shares)
    return [
        f"Of the {len(shares)} rates in the two tables, {whole} rest on times of all calls of the rank whose"
        f" kernels take longest, {half - whole} on times of more than half of that rank's kernel time, and"
        f" {len(shares) - half} mostly on the fit."
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


def granted(stored: dict) -> list[str]:
    """Rates that strategies had over real GPUs beside those that the model gives them."""
    body = []
    for row in stored["rows"]:
        cells = [row["mask"], row["tokens"], row["ranks"], row["strategy"]]
        for which in ("forward", "backward"):
            ran = row["ran"][which]
            errors = (
                f"{100 * (row[model][which] / ran - 1):+.0f} %"
                for model in ("model", "with_measured_links")
            )
            cells += [f"{ran:.0f}", ", ".join(errors)]
        body.append(cells)
    head = ["mask", "tokens a rank", "ranks", "strategy", "forward, as it ran", "the model",
            "backward, as it ran", "the model"]  # fmt: skip
    return [
        "TFLOP/s per GPU of the strategies above over real GPUs, and by how much the model says more of each,"
        " over links of 450 GB/s and over links as fast as they were measured. Kernels take what the fit to"
        " the timed calls says. What the simulation grants the other strategies shows here: transfers at full"
        " rate, hidden where they could be, and no copies beside them.",
        *(["", stored["note"]] if "note" in stored else []),
        "",
        *table(head, body),
    ]
