"""Chooses which pieces of work are worth the time of a GPU, and keeps the choice in a file."""

import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from scaling.fit import Fit, features
from scaling.work import FLOPS_PER_PAIR, OURS, Piece, Work


def choose(
    works: Iterable[tuple[str, Work]], pieces: dict[str, Piece], fit: Fit
) -> dict[str, set[str]]:
    """Names of pieces in the order of their worth, and the passes that each is wanted for.

    Ours first: all calls of the three slowest ranks and of two more. Then, of each other strategy, the calls
    of the slowest rank, or for rings the four slowest calls; then two more of each drawn at random.
    """
    rng = np.random.default_rng(0)
    rounds: tuple[dict, dict, dict] = ({}, {}, {})
    predicted = predict(pieces, fit)

    def want(turn: int, names: np.ndarray, *passes: str) -> None:
        for key in filter(None, np.ravel(names).tolist()):
            rounds[turn].setdefault(key, set()).update(passes)

    def cost_of(calls: np.ndarray) -> np.ndarray:
        return np.array([[predicted.get(key, 0.0) for key in row] for row in calls])

    for name, work in works:
        cost = cost_of(work.calls)
        by_rank = np.argsort(-cost.sum(axis=1), kind="stable")
        if name == OURS:
            sampled = [*by_rank[:3], *rng.permutation(by_rank[3:])[:2]]
            want(0, work.calls[sampled], "forward")
            want(0, work.backward_calls[sampled], "backward")
            if work.travel_calls is not None:
                want(0, work.travel_calls[sampled], *FLOPS_PER_PAIR)
        elif work.level_sizes or cost.shape[1] == 1:
            want(1, work.calls[by_rank[0]], *FLOPS_PER_PAIR)
            want(2, work.calls[rng.permutation(by_rank[1:])[:1]], *FLOPS_PER_PAIR)
        else:
            keys, first = np.unique(work.calls, return_index=True)
            slowest = keys[np.argsort(-cost.ravel()[first], kind="stable")]
            want(1, slowest[:4], *FLOPS_PER_PAIR)
            want(2, rng.permutation(slowest[4:])[:2], *FLOPS_PER_PAIR)
    wanted: dict[str, set[str]] = {}
    for turn in rounds:
        for key, passes in turn.items():
            wanted.setdefault(key, set()).update(passes)
    return wanted


def predict(pieces: dict[str, Piece], fit: Fit) -> dict[str, float]:
    """Forward and backward together, microseconds, of each piece."""
    if not pieces:
        return {}
    table = np.array([features(piece) for piece in pieces.values()])
    total = sum(fit.microseconds(table, which) for which in FLOPS_PER_PAIR)
    return dict(zip(pieces, total.tolist(), strict=True))


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
