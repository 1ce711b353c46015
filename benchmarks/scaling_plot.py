"""Pictures of the simulated rates, as the benchmark pages of MagiAttention draw theirs, with its curves."""

import pathlib

from scaling_work import OURS

# TFLOP/s per GPU at 8, 16, 32 and 64 H100s, read off the bar charts of MagiAttention v1.1's benchmark pages
# (about 5 either way); its masks are packings of its own document lengths.
PUBLISHED_RANKS = (8, 16, 32, 64)
PUBLISHED = {
    ("full", "forward"): {
        "magi native": (663, 652, 643, 627), "magi a2av": (647, 642, 622, 616),
        "ulysses": (603, 573, 581, 618), "usp": (579, 603, 593, 605),
        "ring all-gather": (606, 594, 587, 583), "ring p2p": (511, 535, 517, 513),
    },
    ("full", "backward"): {
        "magi native": (534, 545, 546, 548), "magi a2av": (513, 514, 513, 514),
        "ulysses": (575, 572, 581, 576), "usp": (570, 588, 587, 580),
        "ring all-gather": (533, 543, 540, 536), "ring p2p": (496, 519, 513, 505),
    },
    ("causal", "forward"): {
        "magi native": (643, 646, 619, 593), "magi a2av": (608, 583, 576, 570),
        "ulysses": (599, 556, 579, 581), "usp": (593, 590, 594, 586),
        "ring all-gather": (601, 592, 591, 580), "ring p2p": (421, 455, 452, 446),
    },
    ("causal", "backward"): {
        "magi native": (528, 529, 538, 527), "magi a2av": (501, 508, 499, 495),
        "ulysses": (581, 559, 571, 583), "usp": (572, 570, 575, 571),
        "ring all-gather": (516, 525, 523, 523), "ring p2p": (432, 475, 469, 457),
    },
    ("varlen_full", "forward"): {
        "magi native": (534, 536, 451, 400), "magi a2av": (460, 415, 372, 298),
        "ulysses": (389, 303, 281, 258), "usp": (373, 370, 373, 291),
        "ring all-gather": (386, 386, 323, 248), "ring p2p": (159, 134, 91, 56),
    },
    ("varlen_full", "backward"): {
        "magi native": (446, 461, 454, 423), "magi a2av": (408, 423, 404, 352),
        "ulysses": (424, 397, 376, 345), "usp": (420, 407, 374, 279),
        "ring all-gather": (230, 191, 123, 63), "ring p2p": (160, 161, 101, 48),
    },
    ("varlen_causal", "forward"): {
        "magi native": (457, 426, 314, 237), "magi a2av": (387, 304, 273, 206),
        "ulysses": (278, 197, 184, 162), "usp": (261, 251, 255, 192),
        "ring all-gather": (288, 292, 240, 180), "ring p2p": (89, 69, 48, 28),
    },
    ("varlen_causal", "backward"): {
        "magi native": (360, 370, 333, 264), "magi a2av": (335, 352, 325, 242),
        "ulysses": (331, 293, 275, 248), "usp": (325, 309, 284, 195),
        "ring all-gather": (179, 155, 104, 55), "ring p2p": (97, 86, 57, 29),
    },
}  # fmt: skip
PUBLISHED_MASKS = ("full", "causal", "varlen_full", "varlen_causal")


def draw(rows: list[dict], folder: pathlib.Path) -> None:
    """Writes ``scaling_forward.png`` and ``scaling_backward.png``: one panel for each mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    names = [OURS, *dict.fromkeys(r["strategy"] for r in rows if r["strategy"] != OURS)]
    colours = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    for which in ("forward", "backward"):
        columns = min(4, len(masks))
        lines = -(-len(masks) // columns)
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(4.6 * columns, 3.6 * lines), squeeze=False
        )
        for axis in axes.ravel()[len(masks) :]:
            axis.set_visible(False)
        for axis, mask in zip(axes.ravel(), masks, strict=False):
            _panel(axis, [row for row in rows if row["mask"] == mask], mask, which, colours)
        handles = {}
        for axis in axes.ravel():
            handles.update(dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True)))
        figure.legend(
            handles.values(), handles.keys(), loc="lower center", ncols=6, fontsize=8, frameon=False
        )
        figure.suptitle(
            f"{which}, TFLOP/s per GPU, 8192 tokens a GPU; solid: simulated from kernels timed on one GPU;"
            " dashed: published by MagiAttention, H100",
            fontsize=10,
        )
        figure.tight_layout(rect=(0, 0.12 if lines == 1 else 0.06, 1, 0.98))
        figure.savefig(folder / f"scaling_{which}.png", dpi=80)
        pyplot.close(figure)


def _panel(axis, rows: list[dict], mask: str, which: str, colours: dict) -> None:
    ranks = sorted({row["cp"] for row in rows})
    for name in dict.fromkeys(row["strategy"] for row in rows):
        rates = {row["cp"]: row[which] for row in rows if row["strategy"] == name}
        axis.plot(
            list(rates), list(rates.values()), marker="o", markersize=3, label=name,
            color=colours[name], linewidth=2.5 if name == OURS else 1.2,
        )  # fmt: skip
    published = PUBLISHED.get((mask, which), {})
    for shade, (name, rates) in enumerate(published.items()):
        axis.plot(
            PUBLISHED_RANKS, rates, linestyle="--", linewidth=1, marker="x", markersize=4,
            color=str(0.15 + 0.12 * shade), label=f"published {name}",
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(rank) for rank in ranks])
    axis.set_ylim(0, 720)
    axis.set_title(mask, fontsize=9)
    axis.grid(alpha=0.3)
