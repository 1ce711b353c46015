"""What the results page says of how far a plan could be ahead on a mask, and of where our time goes."""

from report_tables import distinct, table

OURS, ALIKE = "magi_jax", "magi_jax_alike"
AIM, RANKS = 1.3, (32, 64)
REGULAR = ("full", "causal")
FEW_CALLS = 8  # of a rank, of strategies whose kernels are taken for the fastest possible


def compared(rows: list[dict], mask: str, cp: int, which: str) -> tuple[list[dict], dict]:
    """Rows of ours, default first, and that of the best other strategy."""
    here = {r["strategy"]: r for r in rows if r["mask"] == mask and r["cp"] == cp}
    others = [row for name, row in here.items() if not name.startswith(OURS)]
    ours = [here[name] for name in (OURS, ALIKE) if name in here]
    return ours, max(others, key=lambda row: row[which])


def perfect_us(rows: list[dict], mask: str, cp: int, which: str, unhidden_us: float) -> float:
    """Microseconds of a pass with nothing but kernels, shared out evenly, at the best rate that any strategy
    has for them on this mask, and what nobody hides.
    """
    here = [r for r in rows if (r["mask"], r["cp"]) == (mask, cp)]
    few = [r for r in here if r.get(f"{which}_calls", 1) <= FEW_CALLS]
    return min(r[f"{which}_mean_kernel_us"] for r in few) + unhidden_us


def ceilings(stored: dict) -> list[str]:
    """Every cell where a ratio of `AIM` is wanted and not reached: the most that any plan could reach, and
    what our step spends.
    """
    rows, unhidden = stored["rows"], stored["unhidden_us"]
    body, counts = [], {"cells": 0, "reached": 0, "out of reach": 0}
    for which in ("forward", "backward"):
        for mask in (m for m in distinct(rows, "mask") if m not in REGULAR):
            for cp in (n for n in RANKS if n in distinct(rows, "cp")):
                ours, best = compared(rows, mask, cp, which)
                counts["cells"] += 1
                ratios = [row[which] / best[which] for row in ours]
                if min(ratios) >= AIM:
                    counts["reached"] += 1
                    continue
                least_us = perfect_us(rows, mask, cp, which, unhidden[which])
                most = best[f"{which}_us"] / least_us
                counts["reached"] += max(ratios) >= AIM
                counts["out of reach"] += most < AIM
                body.append([
                    mask, cp, which, ", ".join(f"{ratio:.2f}" for ratio in ratios),
                    f"{most:.2f}{' (out of reach)' if most < AIM else ''}", best["strategy"],
                    *(spent(row, which, least_us, unhidden[which]) for row in ours),
                ])  # fmt: skip
    if not body:
        return []
    head = ["mask", "ranks", "pass", "ratio: ours, alike", "at most", "best other",
            "where ours spends its step", "alike"]  # fmt: skip
    return [
        f"### Where less than {AIM} times the best other is reached",
        "",
        f"Of {counts['cells']} cells (irregular masks, {RANKS[0]} and {RANKS[1]} ranks, both passes)"
        f" {counts['reached']} reach {AIM} by default or alike; in {counts['out of reach']} no plan can, by"
        " these times. At most is the ratio of a plan without any loss: the fastest kernels that any strategy"
        " has on the mask, by the same timed and fitted calls, the same work on every rank, no transfer in"
        " sight; all strategies run one kernel, so a faster one would lift both sides. The last columns are"
        " shares of a step, in percent: such a plan / kernels that are slower than those (cut masks, short"
        " calls, merges) / the slowest rank's kernels beyond the mean one's / transfers that nothing hides.",
        "",
        *table(head, body),
    ]


def spent(row: dict, which: str, least_us: float, unhidden_us: float) -> str:
    """Shares of a step in percent: a perfect plan, slower kernels, imbalance, transfers in sight."""
    step, slowest, mean = (row[f"{which}{part}_us"] for part in ("", "_kernel", "_mean_kernel"))
    parts = (
        least_us,
        mean + unhidden_us - least_us,
        slowest - mean,
        step - slowest - unhidden_us,
    )
    return " / ".join(f"{100 * part / step:.0f}" for part in parts)
