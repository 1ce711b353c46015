"""Which chunks are split into units: those too heavy for one rank, and light ones that go with them."""

import numpy as np

from magi_jax.solver.dispatch.needs import travelling_rows
from magi_jax.solver.dispatch.problem import DispatchProblem, areas, cut_at

# A chunk is split when it overloads its rank even beside light chunks, and is a good part of its work.
OVERLOAD = 1.002
HEAVY_SHARE = 0.4
# When whole chunks do not balance, those with more than this share of the mean are split as well.
COARSE_SHARE = 0.1
# (heavy chunks for each rank, parts of each) to split in further attempts.
FINENESS = ((0.0, 1), (1.0, 2), (0.5, 4))
# Its parts are to have at most this share of a rank's mean area.
PART_SHARE = 0.55
MAX_PARTS = 16
MIN_PART_ROWS = 16
# Work of heavy chunks that goes into one place, as a share of the mean: settles how many are split.
PLACE_SHARE = 0.3


def chunks_to_split(
    area: np.ndarray, light_area: float, problem: DispatchProblem, fineness: int
) -> tuple[np.ndarray, int]:
    """Chunks to split and into how many equal parts.

    Parts are to end up on different ranks, where something must fill the rest of their chunk's place:
    so the lightest chunks, which are cheap to scatter, are split in the same way.
    """
    none = np.zeros(0, np.int64), 1
    edges = problem.edges
    slot = int(edges[1] - edges[0])
    mean = area.sum() / problem.cp_size
    others = -(-len(area) // problem.cp_size) - 1
    may_split = np.diff(edges) == slot
    beside = area + others * light_area
    is_heavy = (beside > OVERLOAD * mean) & (area > HEAVY_SHARE * mean) & may_split
    per_rank, coarse_parts = FINENESS[fineness]
    if fineness:
        heaviest = np.argsort(-area, kind="stable")[: int(np.ceil(per_rank * problem.cp_size))]
        is_heavy[heaviest] |= (area[heaviest] > COARSE_SHARE * mean) & may_split[heaviest]
    travels = np.zeros(len(area), bool)
    if len(problem.travelling):  # whoever holds these rows sends them to nearly everyone
        travels = (travelling_rows(problem, edges) > 0) & may_split
    heavy = np.flatnonzero(is_heavy | travels)
    if not len(heavy):
        return none
    parts = 1
    few = travels.any() or not fineness
    most = MAX_PARTS if few else coarse_parts
    while parts < most and slot % (2 * parts) == 0 and slot >= 2 * parts * MIN_PART_ROWS:
        parts *= 2
        if few and not travels.any() and _largest_part(heavy, parts, problem) <= PART_SHARE * mean:
            break
    if parts == 1:
        return none
    light = np.argsort(area, kind="stable")
    light = light[may_split[light] & ~is_heavy[light] & ~travels[light]]
    places = min(int(area[heavy].sum() / (PLACE_SHARE * mean)) + 1, len(heavy) * parts)
    places = max(places, min(int(travels.sum()) * parts, problem.cp_size))
    if fineness:  # heavy parts trade places with light ones, so there must be as many
        places = max(places, 2 * len(heavy))
    return np.sort(np.concatenate([heavy, light[: max(places - len(heavy), 0)]])), parts


def _largest_part(chunks: np.ndarray, parts: int, problem: DispatchProblem) -> int:
    """Largest area of a part when ``chunks`` are cut into ``parts`` equal parts."""
    step = int(problem.edges[1] - problem.edges[0]) // parts
    edges = np.unique(problem.edges[chunks][:, None] + step * np.arange(parts + 1))
    unit, cut = cut_at(problem.slices, edges)
    inside = np.diff(edges) == step  # the other gaps lie between chunks
    return int(areas(unit, cut, len(edges) - 1)[inside].max())
