"""Pictures of a plan: who computes which part of the mask, how much each rank does, who sends to
whom, and when.
"""

from os import PathLike
from typing import Any

import numpy as np

from magi_jax.masks import bands
from magi_jax.plan.measure import make_report
from magi_jax.plan.plot_timeline import draw_timeline
from magi_jax.plan.report import PlanReport
from magi_jax.plan.two_level import pieces_of

PIXELS = 512  # sampled queries and keys of the mask's picture
TICKS = 8  # labelled ranks of an axis, about


def plot_plan(plan, path: str | PathLike, report: PlanReport | None = None) -> None:
    """Writes the picture of a concrete plan.

    Args:
        plan: one whole plan with values.
        path: file to write; its suffix chooses the format.
        report: of this plan, where other rates than the default ones shall predict its timeline.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error

    report = make_report(plan) if report is None else report
    colors = matplotlib.colormaps["turbo"].resampled(max(plan.cp_size, 2))
    figure = Figure(figsize=(15, 9), dpi=150, layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    above, below = rows
    mask_axes, area_axes, traffic_axes = above.subplots(1, 3, width_ratios=[1.15, 1, 1.15])
    _draw_mask(above, mask_axes, plan, colors)
    _draw_area(area_axes, report, colors)
    _draw_traffic(above, traffic_axes, report)
    for axes, timeline, name in zip(
        below.subplots(1, 2),
        (report.forward, report.backward),
        ("forward pass", "backward pass"),
        strict=True,
    ):
        draw_timeline(axes, timeline, name)
        axes.set_yticks(_ticks(plan.cp_size))
    figure.savefig(path)


def _draw_mask(figure, axes, plan, colors) -> None:
    seq_len, cp_size = plan.spec.seq_len, plan.cp_size
    owners = np.ma.masked_less(sampled_owners(plan), 0)
    image = axes.imshow(
        owners,
        cmap=colors,
        vmin=-0.5,
        vmax=max(cp_size, 2) - 0.5,
        extent=(0, seq_len, seq_len, 0),
        interpolation="nearest",
    )
    axes.set(title="Mask, coloured by the rank that computes it", xlabel="key", ylabel="query")
    figure.colorbar(image, ax=axes, shrink=0.8, label="rank", ticks=_ticks(cp_size))


def _draw_area(axes, report: PlanReport, colors) -> None:
    ranks = np.arange(report.cp_size)
    bottom = np.zeros(report.cp_size)
    for stage, area in enumerate(report.area):
        # Later stages are paler; the first is the rank's colour in the picture of the mask.
        axes.bar(
            ranks,
            area,
            bottom=bottom,
            width=0.9,
            color=colors(ranks),
            alpha=1.0 / (1 + 0.6 * stage),
        )
        bottom += area
    axes.bar(ranks, report.travel_area, bottom=bottom, width=0.9, color="black", alpha=0.4)
    bottom += report.travel_area
    axes.axhline(bottom.mean(), color="black", linewidth=0.8, linestyle="--")
    axes.set(
        title=f"Area of each rank: imbalance {report.imbalance:.3f} (dashed: mean)\n"
        "local keys below, remote ones paler, travelled grey",
        xlabel="rank",
        ylabel="(query, key) pairs",
        ylim=(0, 1.05 * max(bottom.max(), 1)),
        xticks=_ticks(report.cp_size),
    )


def _draw_traffic(figure, axes, report: PlanReport) -> None:
    rows = np.ma.masked_equal(report.traffic.sum(axis=0), 0)
    image = axes.imshow(rows, cmap="viridis", interpolation="nearest")
    share = report.recv_rows.max() / max(report.ring_rows.max(), 1)
    nodes = ""
    if report.ranks_per_node < report.cp_size:
        nodes = f"\n{report.crossing_rows.sum():,} in all cross between nodes"
        for edge in range(report.ranks_per_node, report.cp_size, report.ranks_per_node):
            axes.axhline(edge - 0.5, color="white", linewidth=0.4)
            axes.axvline(edge - 0.5, color="white", linewidth=0.4)
    axes.set(
        title=f"Key rows from owner to receiver\nworst rank receives {share:.1%} of a ring's{nodes}",
        xlabel="receiver",
        ylabel="sender",
        xticks=_ticks(report.cp_size),
        yticks=_ticks(report.cp_size),
    )
    figure.colorbar(image, ax=axes, shrink=0.8, label="rows")


def _ticks(cp_size: int) -> np.ndarray:
    return np.arange(0, cp_size, max(-(-cp_size // TICKS), 1))


def sampled_owners(plan, pixels: int = PIXELS) -> np.ndarray:
    """The rank that computes each sampled (query, key) cell, int64 ``[P, P]``, -1 = not visible.

    ``P = min(pixels, seq_len)`` positions are sampled evenly, the same for queries and keys.
    """
    seq_len = plan.spec.seq_len
    count = min(pixels, seq_len)
    sampled = (2 * np.arange(count) + 1) * seq_len // (2 * count)
    positions = np.asarray(plan.positions, np.int64)
    owners = np.full((count, count), -1, np.int64)
    buffers = [positions, *(_received_positions(meta, positions) for meta in plan.comm)]
    parts = [(table, positions, keys) for table, keys in zip(plan.calc, buffers, strict=True)]
    if plan.travel is not None:
        moved = _received_positions(plan.travel.comm, positions)
        parts.append((plan.travel.calc, moved, positions))
    if plan.late is not None:
        received = _received_positions(plan.late.comm, positions)
        parts.append((plan.late.calc, positions, received))
    for table, queries, keys in parts:
        for rank in range(plan.cp_size):
            slices = np.asarray(table.slices[rank], np.int64)
            slices = slices[bands.is_visible(slices)]
            _mark(owners, slices, rank, *(_sampled_rows(x[rank], sampled) for x in (queries, keys)))
    return owners


def _sampled_rows(buffer: np.ndarray, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of the sampled positions a buffer holds, and in which rows; both rising."""
    rising = np.where(buffer < 0, np.iinfo(np.int64).max, buffer)  # padding is at the end
    rows = np.searchsorted(rising, sampled)
    held = np.flatnonzero(rising[np.minimum(rows, len(buffer) - 1)] == sampled)
    return held, rows[held]


def _mark(owners, slices, rank: int, queries, keys) -> None:
    """Enters ``rank`` where its slices are visible; ``queries`` and ``keys`` as `_sampled_rows` gives
    them.
    """
    for query, row in zip(*queries, strict=True):
        low, high = bands.key_bounds(slices, np.full(len(slices), row))
        seen = low < high
        # Keys lie in rising order in every buffer, so an interval of rows is one of sampled keys.
        first, last = (np.searchsorted(keys[1], edge[seen]) for edge in (low, high))
        for a, b in zip(first, last, strict=True):
            owners[query, keys[0][a:b]] = rank


def _received_positions(comm, positions: np.ndarray) -> np.ndarray:
    """Global position of each row of a received buffer, -1 = padding, int64 ``[cp, dst_rows]``."""
    out = np.full((len(positions), comm.dst_rows), -1, np.int64)
    for src, dst, src_row, dst_row, n_rows in zip(*pieces_of(comm), strict=True):
        out[dst, dst_row : dst_row + n_rows] = positions[src, src_row : src_row + n_rows]
    return out
