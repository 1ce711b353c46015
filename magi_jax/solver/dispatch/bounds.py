"""What no dispatch can beat: lower bounds on rows and imbalance, and a plan's distance from them."""

from typing import NamedTuple

import numpy as np

from magi_jax.solver.dispatch.units import Units


class Bounds(NamedTuple):
    """Lower bounds for all placements of the same units.

    Attributes:
        rank_rows: of the most rows that any rank receives or sends.
        node_rows: of the most distinct rows that enter any node.
        total_rows: of the rows that all ranks receive together.
        imbalance: of the largest rank's area over the mean.
    """

    rank_rows: int
    node_rows: int
    total_rows: int
    imbalance: float


def lower_bounds(
    units: Units, num_ranks: int, ranks_per_node: int, area_limit: float = 1.015
) -> Bounds:
    """Bounds that hold for every placement within token capacity whose imbalance is at most ``area_limit``.

    Two arguments, of which the better counts. One unit: whoever holds it sees all its keys and owns at
    most its share of tokens. One span of keys: the units that see it need a certain number of ranks to
    hold their tokens, and to hold their area, and all of those but one receive it.

    Args:
        units: what is placed.
        num_ranks: ranks.
        ranks_per_node: ranks of a node.
        area_limit: imbalance that a placement may have.
    """
    capacity = units.slots * units.slot
    mean_area = units.area.sum() / num_ranks
    most_needed = int(units.need_rows.max(initial=0))
    tokens = np.zeros(len(units.area), np.int64)
    tokens[: len(units.chunk)] = np.diff(units.edges)
    reader_tokens, reader_area = (
        _sum_over_readers(units, tokens),
        _sum_over_readers(units, units.area),
    )
    rows = units.rows.astype(np.int64)

    def groups(size: int) -> int:
        """Rows received by all groups of ``size`` ranks together."""
        by_tokens = -(-reader_tokens // (capacity * size))
        by_area = np.ceil(reader_area / max(area_limit * mean_area * size, 1.0) - 1e-9)
        holders = np.maximum(np.maximum(by_tokens, by_area), 1).astype(np.int64)
        return int((rows * (holders - 1)).sum())

    total, node_total = groups(1), groups(ranks_per_node)
    num_nodes = num_ranks // ranks_per_node
    return Bounds(
        rank_rows=max(most_needed - capacity, -(-total // num_ranks), 0),
        node_rows=max(most_needed - capacity * ranks_per_node, -(-node_total // num_nodes), 0),
        total_rows=total,
        imbalance=_imbalance_bound(units, mean_area),
    )


def _sum_over_readers(units: Units, amount: np.ndarray) -> np.ndarray:
    """Sum of ``amount`` over the units that need each span, ``[V]``."""
    reader = np.repeat(np.arange(len(units.area)), np.diff(units.need_ptr))
    steps = np.zeros(len(units.rows) + 1, np.int64)
    np.add.at(steps, units.needs[:, 0], amount[reader])
    np.subtract.at(steps, units.needs[:, 1], amount[reader])
    return np.cumsum(steps)[:-1]


def _imbalance_bound(units: Units, mean_area: float) -> float:
    """The heaviest whole unit needs a rank, which it shares with the lightest ones at best."""
    if mean_area == 0:
        return 1.0
    whole = np.sort(units.area[units.size == units.slot])
    if units.split_chunks or not len(whole):
        # Parts may lie beside parts, so only the heaviest unit by itself is certain.
        return max(1.0, float(units.area.max() / mean_area))
    beside = whole[: max(units.slots - 1, 0)].sum() if len(whole) > units.slots else 0
    return max(1.0, float((whole[-1] + beside) / mean_area))


def gap(value: float, bound: float) -> float:
    """How far a value is above its bound, as a share of the bound; 0 for an attained bound of 0."""
    if bound <= 0:
        return 0.0 if value <= 0 else float("inf")
    return value / bound - 1.0
