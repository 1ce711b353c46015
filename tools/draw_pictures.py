"""Draws the pictures of the documentation: `python tools/draw_pictures.py`."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import magi_jax as mj

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
T = 64


def draw_masks(path: Path) -> None:
    """Six masks, each coloured by slice."""
    masks = {
        "packed documents, causal": mj.masks.varlen([22, 6, 36], causal=True),
        "sliding window, sink tokens": mj.masks.local(
            T, window=(11, 0), causal=True, global_prefix=4
        ),
        "prefix, then causal": mj.masks.prefix_lm([40, 24], [14, 8]),
        "frames of two clips": mj.masks.uniform_block_causal([40, 24], 8),
        "shared question": mj.masks.shared_question([16, 10], [[12, 8], [10, 8]]),
        "window | global rows": mj.masks.local(T, window=(6, 6))
        | mj.masks.global_rows(T, rows=(30, 34)),
    }
    figure = Figure(figsize=(10.5, 3.1 * 2.2), dpi=110, layout="constrained")
    for axes, (name, mask) in zip(figure.subplots(2, 3).flat, masks.items(), strict=True):
        picture = np.full((T, T), np.nan)
        for i, row in enumerate(mask.slices):
            one = mj.AttnMask(row[None], T, T, disjoint=True).dense()
            picture[one] = i % 10
        axes.imshow(picture, cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
        axes.set(title=f"{name}: {len(mask.slices)} slices", xlabel="key", ylabel="query")
    figure.savefig(path)


def draw_plan(path: Path) -> None:
    """The plan of a few documents over eight ranks."""
    lengths = [40_000, 1_200, 7_000, 300, 60_000, 22_572]
    mj.make_plan(mj.masks.varlen(lengths, causal=True), 8).plot(path)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    draw_masks(FOLDER / "masks.png")
    draw_plan(FOLDER / "plan.png")
