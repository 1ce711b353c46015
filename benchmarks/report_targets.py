"""What the simulation was to show, and whether it does."""

from report_ceilings import AIM, OURS, RANKS, REGULAR, RIVALS, compared, ratios

# TFLOP/s at 64 ranks, and the share of their kernels' rate that regular masks keep there, which are aimed at.
RATES = (
    ("varlen_causal", "forward", 500), ("varlen_full", "forward", 550),
    ("varlen_causal", "backward", 430),
)  # fmt: skip
SHARE = 0.97


def targets(rows: list[dict]) -> list[list[str]]:
    """What the simulation was to show, and what it shows, of the masks and ranks that are there."""
    body = []
    for mask, which, rate in RATES:
        if ours := _at_64(rows, mask, which):
            text = f"{mask} {which} at 64 ranks: {rate} TFLOP/s"
            body.append([text, *(f"{row[which]:.0f}" for row in ours)])
    for mask in REGULAR:
        for which in ("forward", "backward"):
            if ours := _at_64(rows, mask, which):
                shares = [row[f"{which}_kernel_us"] / row[f"{which}_us"] for row in ours]
                text = f"{mask} {which} at 64 ranks: {SHARE} of its kernels alone"
                body.append([text, *(f"{share:.3f}" for share in shares)])
    for whom, ways in beside_rivals(rows).items():
        text = f"irregular masks at 32 and 64 ranks: {AIM} times the best of {whom}"
        body.append([text, *_reached(ways, AIM)])
    if found := regular(rows):
        body.append(["full and causal at all ranks: never behind", *_reached(found, 1.0)])
    return body


def in_short(rows: list[dict]) -> list[str]:
    """The same in a few lines, the default alone."""
    rates = [
        f"{mask} {which} {ours[0][which]:.0f} ({wanted})"
        for mask, which, wanted in RATES
        if (ours := _at_64(rows, mask, which))
    ]
    shares = [
        f"{mask} {which} {ours[0][f'{which}_kernel_us'] / ours[0][f'{which}_us']:.3f}"
        for mask in REGULAR
        for which in ("forward", "backward")
        if (ours := _at_64(rows, mask, which))
    ]
    counts = [
        f"{sum(ratio >= AIM for ratio in ways[0].values())} beside {whom}"
        for whom, ways in beside_rivals(rows).items()
    ]
    lines = []
    if rates:
        lines.append(f"64 ranks, TFLOP/s (wanted): {', '.join(rates)}")
    if shares:
        lines.append(f"64 ranks, rate over that of the kernels ({SHARE}): {', '.join(shares)}")
    if counts:
        cells = len(next(iter(beside_rivals(rows).values()))[0])
        lines.append(
            f"irregular masks, 32 and 64 ranks: {AIM} times the best other (wanted in all {cells} cells) in"
            f" {'; in '.join(counts)}"
        )
    if found := regular(rows):
        lines.append(f"full and causal, all ranks: level or ahead in {_reached(found[:1], 1.0)[0]}")
    return lines


def _at_64(rows: list[dict], mask: str, which: str) -> list[dict]:
    """Rows of ours on a mask at 64 ranks, if it is there."""
    there = any((r["mask"], r["cp"]) == (mask, 64) for r in rows)
    return compared(rows, mask, 64, which)[0] if there else []


def beside_rivals(rows: list[dict]) -> dict[str, list[dict]]:
    """Ratios on irregular masks at many ranks, by who the others are; see `ratios`."""
    places = {(r["mask"], r["cp"]) for r in rows}
    irregular = sorted(p for p in places if p[0] not in REGULAR and p[1] in RANKS)
    return {
        whom: ratios(rows, irregular, without)
        for whom, without in RIVALS.items()
        if irregular and all(_is_there(rows, *place, without) for place in irregular)
    }


def regular(rows: list[dict]) -> list[dict]:
    """Ratios on full and causal masks at all ranks; see `ratios`."""
    return ratios(rows, sorted({(r["mask"], r["cp"]) for r in rows if r["mask"] in REGULAR}))


def _is_there(rows: list[dict], mask: str, cp: int, without: tuple[str, ...]) -> bool:
    """Whether anybody is left beside ours."""
    here = {r["strategy"] for r in rows if (r["mask"], r["cp"]) == (mask, cp)}
    return any(not name.startswith(OURS) and name not in without for name in here)


def _reached(ways: list[dict[tuple[str, int, str], float]], least: float) -> list[str]:
    """How many cells reach a ratio, and the least of them, by way of ours."""
    cells = []
    for found in ways:
        worst = min(found, key=found.__getitem__)
        reached = sum(ratio >= least for ratio in found.values())
        place = f"({worst[0]}, {worst[1]} ranks, {worst[2]})"
        cells.append(f"{reached} of {len(found)} cells; least {found[worst]:.2f} {place}")
    return cells
