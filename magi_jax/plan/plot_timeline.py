"""Picture of a predicted timeline: what each rank computes and receives, and when."""

import numpy as np

from magi_jax.solver.cost.timeline import Timeline

CAST_COLOR, REDUCE_COLOR, TRAVEL_COLOR = "tab:orange", "tab:red", "tab:green"
WITHIN_COLORS = ("gold", "lightcoral")  # of the steps of casts and of reduces inside nodes
COMPUTE_COLORS = ("#1f4e79", "#4a8ac4")  # of stages in turn
HEIGHT = 0.42  # of a bar; computing lies above communication in the row of a rank


def draw_timeline(axes, timeline: Timeline, name: str) -> None:
    """Draws one direction: a row for each rank, kernels in blue above its casts and reduces.

    Args:
        axes: axes of matplotlib.
        timeline: as `magi_jax.solver.cost.schedule.simulate` gives it.
        name: of the direction, for the title.
    """
    ranks = np.arange(timeline.compute.shape[1])
    for stage, spans in enumerate(timeline.compute):
        label = ("local attention", "remote attention")[min(stage, 1)] if stage < 2 else None
        color = COMPUTE_COLORS[min(stage, 1)]
        _bars(axes, ranks - HEIGHT / 2, spans, color, label, edge="white")
    for parts, color, label in (
        (timeline.cast, CAST_COLOR, "cast"),
        (timeline.reduce, REDUCE_COLOR, "reduce"),
    ):
        for stage, spans in enumerate(parts):
            if (spans[:, 1] > spans[:, 0]).any():
                _bars(axes, ranks + HEIGHT / 2, spans, color, label if stage == 0 else None)
    for parts, color, label in zip(
        timeline.within,
        WITHIN_COLORS,
        ("cast inside nodes", "reduce inside nodes"),
        strict=True,
    ):
        for stage, spans in enumerate(parts):
            if (spans[:, 1] > spans[:, 0]).any():
                _bars(axes, ranks + HEIGHT / 2, spans, color, label if stage == 0 else None)
    moved, kernel, returned = timeline.travel
    if kernel.any():
        _bars(axes, ranks - HEIGHT / 2, kernel, TRAVEL_COLOR, None, edge="white")
        _bars(axes, ranks + HEIGHT / 2, moved, TRAVEL_COLOR, "travelling queries")
        _bars(axes, ranks + HEIGHT / 2, returned, TRAVEL_COLOR, None)
    axes.axvline(timeline.predicted_us, color="black", linewidth=0.8, linestyle="--")
    axes.set(
        title=f"Predicted {name}: {timeline.predicted_us:,.0f} us on the slowest rank (dashed)",
        xlabel="us",
        ylabel="rank",
        xlim=(0, max(timeline.predicted_us, 1.0) * 1.02),
        ylim=(len(ranks) - 0.4, -0.6),
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False, fontsize=8)


def _bars(axes, rows, spans, color, label, edge=None) -> None:
    axes.barh(
        rows,
        spans[:, 1] - spans[:, 0],
        left=spans[:, 0],
        height=HEIGHT,
        color=color,
        edgecolor=edge,
        linewidth=0.3,
        label=label,
    )
