"""What the results page says of attention over GPUs that really ran together."""

from report_tables import distinct, losses, table

OURS = "magi_jax"


def rivals(stored: dict) -> list[str]:
    """Other strategies beside ours, on real devices."""
    rows = stored["rows"]
    names = [name for name in distinct(rows, "strategy") if name != OURS]
    body, behind = [], []
    for mask, heads in dict.fromkeys((r["mask"], r["heads"]) for r in rows):
        here = {r["strategy"]: r for r in rows if (r["mask"], r["heads"]) == (mask, heads)}
        for which in ("forward", "backward"):
            ours = here[OURS][which]
            cells = [mask, heads, which, f"{ours:.0f}"]
            for name in names:
                if name not in here or which not in here[name]:
                    cells.append("")
                    continue
                cells.append(f"{here[name][which]:.0f} ({ours / here[name][which]:.2f})")
                if here[name][which] > ours:
                    share = ours / here[name][which]
                    behind.append(f"{mask}, {heads}, {which}: {name} ({share:.3f})")
            body.append(cells)
    return [
        f"TFLOP/s per GPU of a step over {stored['ranks']} GPUs, {rows[0]['tokens']} tokens each, ours by"
        " default, the others with the same kernel; in brackets how many times their rate ours is. Each"
        " mask is timed strategy after strategy on the same warm cards.",
        *(["", stored["note"]] if "note" in stored else []),
        "",
        *table(["mask", "heads", "pass", "ours", *names], body),
        "",
        *losses("Strategies that are ahead, with our share of their rate", behind),
    ]


def distributed(stored: dict) -> list[str]:
    """Ours over all GPUs beside each GPU alone."""
    rows = [r for r in stored["rows"] if "forward_ratio" in r]
    alone = {(r["mask"], r["heads"]): r for r in stored["rows"] if r["transport"] == "each GPU"}
    body = []
    for row in rows:
        other = alone.get((row["mask"], row["heads"]), {})
        cells = [row["mask"], row["heads"], row["tokens"], row["transport"]]
        for which in ("forward", "backward"):
            by_itself = other.get(f"{which}_tflops")
            cells.append("" if by_itself is None else f"{by_itself:.0f}")
            cells.append(f"{row[f'{which}_tflops']:.0f} ({row[f'{which}_ratio']:.3f})")
        body.append(cells)
    head = ["mask", "heads", "tokens a GPU", "transport", "forward alone", "together",
            "backward alone", "together"]  # fmt: skip
    return [
        f"TFLOP/s per GPU of `dist_attention` over {stored['ranks']} GPUs, beside the slower of them that has"
        " the whole mask to itself, in turns; in brackets the ratio. [Collectives](collectives.md) says where"
        " the rest goes.",
        *(["", stored["note"]] if "note" in stored else []),
        "",
        *table(head, body),
    ]


def collectives(stored: dict) -> list[str]:
    """Casts and reduces by transport, blocks and size of pieces, beside XLA's collectives."""
    rows = [row for row in stored["rows"] if "gb_per_s" in row and "how" not in row]
    moved = [row for row in rows if "piece_kib" in row]
    calls, pieces = distinct(moved, "call"), sorted(distinct(moved, "piece_kib"))
    ways = dict.fromkeys(tuple(map(row.get, ("transport", "placement", "blocks"))) for row in moved)
    body = []
    for way in ways:
        rates = {
            (row["call"], row["piece_kib"]): f"{row['gb_per_s']:.0f}"
            for row in moved
            if tuple(map(row.get, ("transport", "placement", "blocks"))) == way
        }
        cells = [rates.get((call, kib), "") for call in calls for kib in pieces]
        body.append([*("" if part is None else part for part in way), *cells])
    head = [f"{call}, {kib} KiB" for call in calls for kib in pieces]
    others = [f"{row['call']} {row['gb_per_s']:.0f}" for row in rows if "piece_kib" not in row]
    return [
        f"GB/s that each of {stored['ranks']} GPUs receives while it sends as much, rows of 2 KiB in pieces"
        " of this size in random order. XLA's collectives and copies between the same GPUs, which move equal"
        f" blocks as they lie: {', '.join(others) or 'not timed'}.",
        *(["", stored["note"]] if "note" in stored else []),
        "",
        *table(["transport", "operands", "blocks", *head], body),
    ]
