"""Pictures of the simulated rates, as the benchmark pages of MagiAttention draw theirs, with its curves."""

import pathlib

from scaling.published import PUBLISHED, PUBLISHED_RANKS
from scaling.work import ALIKE, OURS


def draw(rows: list[dict], folder: pathlib.Path) -> None:
    """Writes ``scaling_forward.png`` and ``scaling_backward.png``: one panel for each mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    names = dict.fromkeys([OURS, ALIKE, *(row["strategy"] for row in rows)])
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
            color=colours[name], linewidth=2.5 if name.startswith(OURS) else 1.2,
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
