"""How much of what the simulation says rests on the links that it assumes."""

from typing import NamedTuple

from scaling.machine import Machine, Times
from scaling.model import step_us
from scaling.orders import MANY_RANKS, REGULAR, Works
from scaling.work import ALIKE, FLOPS_PER_PAIR, OURS, Work


class Links(NamedTuple):
    """GB/s of a GPU inside a node, for ours forward and backward and for the others, and between nodes."""

    what: str
    ours: float
    ours_backward: float
    others: float
    far: float


# Of `collectives_h200.json`: between two H200s of a node, 256 MiB each way in pieces of 1 MiB, our cast by 8
# thread blocks, as plans run it, brings 316, our sums of float32 by as many 272 (by 16 blocks 329 and 319);
# XLA's ppermute, all_to_all and all_gather 301, 279 and 253. Backward ours gets the lower rate both ways.
MEASURED = Links(
    "inside a node as measured: ours 316 GB/s, backward 272, the others 301",
    316.0,
    272.0,
    301.0,
    50.0,
)
OTHER_LINKS = (
    MEASURED,
    Links("half as fast between nodes, 25 GB/s", 450.0, 450.0, 450.0, 25.0),
    Links("twice as fast between nodes, 100 GB/s", 450.0, 450.0, 450.0, 100.0),
)


def step_over(links: Links, name: str, work: Work, times: Times, ranks: int) -> dict[str, float]:
    """Microseconds of a step by pass over other links."""
    near = {
        "forward": links.ours if name.startswith(OURS) else links.others,
        "backward": links.ours_backward if name.startswith(OURS) else links.others,
    }
    machine = Machine()._replace(far=links.far * 1e3)
    return {
        which: step_us(name, work, times, ranks, machine._replace(near=gbps * 1e3))[which]
        for which, gbps in near.items()
    }


def with_other_links(works: Works, times: dict[tuple, Times]) -> list[dict]:
    """Ratios of ours and of alike to the best other, on irregular masks at many ranks, over other links.

    Plans stay those that were made for the usual links.

    Args:
        times: of each work.
    """
    problems = dict.fromkeys(
        key[:2] for key in works if key[0] >= MANY_RANKS and key[1] not in REGULAR
    )
    found = []
    for links in OTHER_LINKS:

        def us(key: tuple[int, str, str], links: Links = links) -> dict[str, float]:
            return step_over(links, key[2], works[key], times[key], key[0])

        ratios: dict[str, list[float]] = {OURS: [], ALIKE: []}
        for problem in problems:
            _add_ratios(ratios, {k[2]: us(k) for k in works if k[:2] == problem})
        found.append({"what": links.what, **{name: each for name, each in ratios.items() if each}})
    return found


def _add_ratios(ratios: dict[str, list[float]], steps: dict[str, dict[str, float]]) -> None:
    """Adds those of one problem, both passes, from microseconds by strategy and pass."""
    for which in FLOPS_PER_PAIR:
        best = min(us[which] for name, us in steps.items() if not name.startswith(OURS))
        for name in ratios.keys() & steps.keys():
            ratios[name].append(round(best / steps[name][which], 3))
