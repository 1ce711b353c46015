"""What the results page says of how far a plan could be ahead on a mask, and of where our time goes."""

from report_tables import distinct, table

OURS, ALIKE = "magi_jax", "magi_jax_alike"
AIM, RANKS = 1.3, (32, 64)
REGULAR = ("full", "causal")
FEW_CALLS = 8  # of a rank, of strategies whose kernels are taken for the fastest possible
EVEN = ("hybrid_even2", "hybrid_even4")
# Others beside which ours is counted, by what they are, and who is not among them.
RIVALS = {
    "all others": (),
    "all but hybrids of larger groups": EVEN,
    "all but hybrids": ("hybrid", *EVEN),
}


def compared(
    rows: list[dict], mask: str, cp: int, which: str, without: tuple[str, ...] = ()
) -> tuple[list[dict], dict]:
    """Rows of ours, default first, and that of the best other strategy, some of which may be left out."""
    here = {r["strategy"]: r for r in rows if r["mask"] == mask and r["cp"] == cp}
    others = [r for name, r in here.items() if not name.startswith(OURS) and name not in without]
    ours = [here[name] for name in (OURS, ALIKE) if name in here]
    return ours, max(others, key=lambda row: row[which])


def ratios(
    rows: list[dict], cells: list[tuple[str, int]], without: tuple[str, ...] = ()
) -> list[dict[tuple[str, int, str], float]]:
    """Rates of ours over the best other, by mask, ranks and pass: of the default, and of alike.

    Args:
        cells: masks and ranks.
        without: others that do not count.
    """
    found: list[dict[tuple[str, int, str], float]] = [{}, {}]
    for mask, cp in cells:
        for which in ("forward", "backward"):
            ours, best = compared(rows, mask, cp, which, without)
            for way, row in zip(found, ours, strict=False):
                way[mask, cp, which] = row[which] / best[which]
    return [way for way in found if way]


def perfect_us(rows: list[dict], mask: str, cp: int, which: str, unhidden_us: float) -> float:
    """Microseconds of a pass with nothing but kernels, shared out evenly, at the best rate that any strategy
    has for them on this mask, and what nobody hides.
    """
    here = [r for r in rows if (r["mask"], r["cp"]) == (mask, cp)]
    few = [r for r in here if r.get(f"{which}_calls", 1) <= FEW_CALLS]
    return min(r[f"{which}_mean_kernel_us"] for r in few) + unhidden_us


def ceilings(stored: dict) -> list[str]:
    """Irregular masks at many ranks: ratios, the most that any plan could reach, and what our step spends."""
    rows, unhidden = stored["rows"], stored["unhidden_us"]
    masks = [m for m in distinct(rows, "mask") if m not in REGULAR]
    places = [(w, n) for w in ("forward", "backward") for n in RANKS if n in distinct(rows, "cp")]
    if not masks or not places:
        return []
    body, counts = [], {"cells": 0, "reached": 0, "out of reach": 0}
    for mask in masks:
        cells = []
        for which, cp in places:
            ours, best = compared(rows, mask, cp, which)
            each = [row[which] / best[which] for row in ours]
            least_us = perfect_us(rows, mask, cp, which, unhidden[which])
            most = best[f"{which}_us"] / least_us
            counts["cells"] += 1
            counts["reached"] += max(each) >= AIM
            counts["out of reach"] += most < AIM
            text = f"{', '.join(f'{ratio:.2f}' for ratio in each)} of {most:.2f}"
            cells.append(f"{text}: {spent(ours[0], which, least_us, unhidden[which])}")
        body.append([mask, *cells])
    return [
        f"### How near to {AIM} times the best other",
        "",
        f"Of {counts['cells']} cells {counts['reached']} reach {AIM} by default or alike; in"
        f" {counts['out of reach']} no plan can, by these times. A cell has the ratio of ours and of alike to"
        " the best other; the ratio of a plan without any loss, with the fastest kernels that any strategy"
        " has on the mask by the same timed and fitted calls, the same work on every rank and no transfer in"
        " sight (all strategies run one kernel, so that a faster one would lift both sides); and shares of"
        " our step in percent: such a plan / kernels that are slower than those (cut masks, short calls,"
        " merges) / the slowest rank's kernels beyond the mean one's / transfers that nothing hides.",
        "",
        *table(["mask", *(f"{which}, {cp} ranks" for which, cp in places)], body),
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
