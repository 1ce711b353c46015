"""Chooses which pieces of work are worth the time of a GPU, and keeps the choice in a file."""

import pathlib
from typing import NamedTuple

import numpy as np

from scaling.fit import Fit, features
from scaling.work import FLOPS_PER_PAIR, OURS, Piece, Work

Works = dict[tuple[int, str, str], Work]  # by ranks, mask and strategy


class Posed(NamedTuple):
    """All that is to be compared.

    Attributes:
        works: by ranks, mask and strategy.
        pieces: of all works, by name.
        areas: visible pairs, by ranks and mask.
    """

    works: Works
    pieces: dict[str, Piece]
    areas: dict[tuple[int, str], int]


CLOSE, WORTH_A_LOOK = 0.9, 0.7  # of the best other strategy's rate
# Ratios are aimed at on these masks, and on others from so many ranks on.
REGULAR, MANY_RANKS = ("full", "causal"), 32
FEW_STEPS = 8  # calls of a rank, of strategies that are asked for the rate of their kernels
NEAR = 0.97  # of the kernel time of the slowest rank: who is above by the fit may be the slowest
ROUNDS = (
    (1, CLOSE),
    (4, CLOSE),
    (1, WORTH_A_LOOK),
    (16, CLOSE),
    (None, CLOSE),
)  # ranks, and of whom


def choose(
    works: Works, predicted: dict[str, dict[str, float]], steps: dict[tuple, dict[str, float]]
) -> dict[str, set[str]]:
    """Names of pieces in the order of their worth, and the passes that each is wanted for.

    By rounds: first the slowest rank of ours and of the others that are close to the best other in a pass, on
    every problem, so that all that is compared rests on measured calls; then more and more of the ranks that
    may be the slowest. In a round those come first whose ratios are aimed at. After the first round come two
    typical ranks of the strategy whose kernels should be the fastest: a perfect plan would reach their rate.

    Args:
        predicted: microseconds of each piece, by pass; see `predict`.
        steps: predicted microseconds of each work, by pass.
    """
    wanted: dict[str, set[str]] = {}
    # Regular masks side by side: there strategies differ by less than the pace of a card within a minute.
    posed = sorted(
        dict.fromkeys(key[:2] for key in works),
        key=lambda problem: (problem[1] not in REGULAR, not _aimed(*problem)),
    )
    for most_ranks, share in ROUNDS:
        for problem in posed:
            named = {key[2]: key for key in works if key[:2] == problem}
            for which in FLOPS_PER_PAIR:
                for name in (n for n in named if _compares(n, named, steps, which, share)):
                    work = works[named[name]]
                    _want(wanted, calls_of(work, which), which, predicted, most_ranks)
                    if work.travel_calls is not None:
                        _want(wanted, work.travel_calls[:, None], which, predicted, most_ranks)
        if (most_ranks, share) == ROUNDS[0]:
            for problem in (p for p in posed if p[1] not in REGULAR and _aimed(*p)):
                here = [work for key, work in works.items() if key[:2] == problem]
                for which in FLOPS_PER_PAIR:
                    _want_fastest(wanted, here, which, predicted)
    return wanted


def _aimed(ranks: int, mask: str) -> bool:
    """Whether a ratio to the others is aimed at."""
    return mask in REGULAR or ranks >= MANY_RANKS


def calls_of(work: Work, which: str) -> np.ndarray:
    return work.backward_calls if which == "backward" else work.calls


def _compares(name: str, named: dict[str, tuple], steps: dict, which: str, share: float) -> bool:
    """Whether a strategy is ours, or reaches a share of the best other's rate in a pass."""
    if name.startswith(OURS):
        return True
    others = [key for n, key in named.items() if not n.startswith(OURS)]
    return min(steps[key][which] for key in others) >= share * steps[named[name]][which]


def _want(
    wanted: dict, calls: np.ndarray, which: str, predicted: dict, most_ranks: int | None
) -> None:
    """Adds the calls of the slowest ranks, slowest first."""
    total = _kernel_us(calls, predicted[which])
    slowest = np.argsort(-total, kind="stable")[:most_ranks]
    for rank in slowest[total[slowest] >= NEAR * total.max()]:
        _add(wanted, calls[rank], which)


def _want_fastest(wanted: dict, works: list[Work], which: str, predicted: dict) -> None:
    """Adds the calls of two typical ranks of whose kernels take least time, of few calls a rank."""
    calls = [calls_of(work, which) for work in works]
    total = [_kernel_us(c, predicted[which]) for c in calls if c.shape[1] <= FEW_STEPS]
    calls = [c for c in calls if c.shape[1] <= FEW_STEPS]
    best = int(np.argmin([us.mean() for us in total]))
    for rank in np.argsort(np.abs(total[best] - total[best].mean()), kind="stable")[:2]:
        _add(wanted, calls[best][rank], which)


def _kernel_us(calls: np.ndarray, predicted: dict[str, float]) -> np.ndarray:
    """Predicted times of all calls of each rank, ``[groups]``."""
    return np.array([sum(predicted.get(key, 0.0) for key in row) for row in calls])


def _add(wanted: dict, calls: np.ndarray, which: str) -> None:
    for key in filter(None, calls.tolist()):
        wanted.setdefault(key, set()).add(which)


def predict(pieces: dict[str, Piece], fit: Fit) -> dict[str, dict[str, float]]:
    """Microseconds of each piece, by pass."""
    table = np.array([features(piece) for piece in pieces.values()]).reshape(len(pieces), -1)
    return {
        which: dict(zip(pieces, fit.microseconds(table, which).tolist(), strict=True))
        for which in FLOPS_PER_PAIR
    }


class Order(NamedTuple):
    """A piece to time, and the passes that are wanted of it."""

    piece: Piece
    passes: tuple[str, ...]


def save_orders(path: pathlib.Path, orders: dict[str, Order]) -> None:
    """Writes orders as they come; small enough to travel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pieces = [order.piece for order in orders.values()]
    sizes = np.array([piece[1:] for piece in pieces], dtype=object).astype(str)
    np.savez_compressed(
        path,
        rows=np.concatenate([piece.slices for piece in pieces]),
        counts=np.array([len(piece.slices) for piece in pieces]),
        sizes=sizes.astype("U8"),
        passes=np.array([" ".join(order.passes) for order in orders.values()]),
    )


def load_orders(path: pathlib.Path) -> dict[str, Order]:
    """The inverse of `save_orders`."""
    with np.load(path) as stored:
        rows = np.split(stored["rows"], np.cumsum(stored["counts"])[:-1])
        sizes, passes = stored["sizes"].tolist(), stored["passes"].tolist()
    orders = [
        Order(Piece(slices, *(int(size) for size in entry[:4]), entry[4]), tuple(which.split()))
        for slices, entry, which in zip(rows, sizes, passes, strict=True)
    ]
    return {order.piece.key: order for order in orders}
