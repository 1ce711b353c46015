"""Capacities in buckets, and the comparison of sizes that have them."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

# Smallest capacities: shapes stay away from zero, and small masks share one bucket.
MIN_ENTRIES = 16  # slices, runs, ids and pieces of a table
MIN_PAIR_ROWS = 8  # rows of one pair of ranks, sent even where there is nothing to send
MIN_BUFFER_ROWS = 128  # rows of a received buffer: one tile
MIN_SEGMENTS = 4  # segments of a rank


def bucket(size: int, minimum: int = 1) -> int:
    """Rounds ``max(size, minimum)`` up to 1, 1.25, 1.5 or 1.75 times a power of two."""
    size = max(int(size), minimum)
    if size <= 4:
        return size
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


def entries_factor(factor: float) -> float:
    """How much more room to leave in tables where rows get ``factor`` times as much.

    An entry takes a few bytes, a row of a buffer thousands, and time to move; and of the two, numbers of
    entries differ far more from mask to mask.
    """
    return min(1 + 4 * (factor - 1), 2 * factor)


def require_growth(factor: float) -> None:
    """Raises ValueError unless sizes times ``factor`` leave room for what they are of."""
    if not factor >= 1:
        raise ValueError(f"a spec is scaled by a factor of at least 1, got {factor}")


def capacity(minimum: int | None = 0) -> dict[str, int | None]:
    """Marks a field that need only be large enough, rounded up to buckets unless ``minimum`` is None."""
    return {"capacity": minimum}


@dataclass(frozen=True)
class Sizes:
    """Comparison of specs, field by field; fields made by `capacity` need only be large enough."""

    def shortfall(self, other, path: str = "spec") -> str | None:
        """Says where this spec is too small for ``other`` or of another kind; None when it covers
        it.
        """
        return _shortfall(self, other, path, capacity=False)

    def rounded(self):
        """The same with every capacity rounded up to its bucket."""
        return rounded(self, None)

    def covers(self, other) -> bool:
        """Whether tables that need ``other`` fit into this spec."""
        return self.shortfall(other) is None

    def union(self, *others):
        """The smallest spec that covers this one and all others.

        Raises:
            TypeError: one of them is another kind of spec, or none.
            ValueError: an identity differs; it is named.
        """
        for other in others:
            if type(other) is not type(self):
                raise TypeError(
                    f"a {type(self).__name__} is united with its like, got {type(other).__name__}"
                )
        return functools.reduce(type(self)._union_of_two, others, self)

    def _union_of_two(self, other):
        return union_of(self, other, "spec", capacity=False)


def rounded(sizes: Any, minimum: int | None, factor: float = 1.0) -> Any:
    """Sizes with their capacities times ``factor``, rounded up to buckets of at least ``minimum``."""
    if sizes is None:
        return None
    if isinstance(sizes, tuple):
        return tuple(rounded(entry, minimum, factor) for entry in sizes)
    if isinstance(sizes, Sizes):
        values = (
            rounded(getattr(sizes, f.name), f.metadata.get("capacity"), factor)
            for f in dataclasses.fields(sizes)
        )
        return type(sizes)(*values)
    return sizes if minimum is None else bucket(math.ceil(sizes * factor), minimum)


def _is_list_of_parts(mine: Any, other: Any) -> bool:
    """Whether both are tuples of sizes, of which one may be longer, and not of plain numbers."""
    return isinstance(mine, tuple) and all(isinstance(part, Sizes) for part in mine + other)


def _shortfall(mine: Any, other: Any, path: str, capacity: bool) -> str | None:
    if other is None:  # an absent part needs nothing
        return None
    if mine is None:
        return f"{path} is None, but one is needed"
    if _is_list_of_parts(mine, other):
        if len(mine) < len(other):  # entries beyond may stay empty
            return f"{path} has {len(mine)} entries, but {len(other)} are needed"
        pairs = enumerate(zip(mine, other, strict=False))
        steps = ((f"{path}[{i}]", a, b, capacity) for i, (a, b) in pairs)
    elif isinstance(mine, Sizes):
        if type(mine) is not type(other):
            return f"{path} is a {type(mine).__name__}, but must be a {type(other).__name__}"
        steps = (
            (
                f"{path}.{f.name}",
                getattr(mine, f.name),
                getattr(other, f.name),
                "capacity" in f.metadata,
            )
            for f in dataclasses.fields(mine)
        )
    elif capacity:
        return None if mine >= other else f"{path} is {mine}, but {other} is needed"
    else:
        return None if mine == other else f"{path} is {mine}, but must be {other}"
    return next(filter(None, (_shortfall(a, b, name, c) for name, a, b, c in steps)), None)


def union_of(mine: Any, other: Any, path: str, capacity: bool) -> Any:
    """The smallest sizes that cover both; raises ValueError where what must be equal at ``path`` differs."""
    if mine is None or other is None:
        return other if mine is None else mine
    if _is_list_of_parts(mine, other):
        pairs = enumerate(zip(mine, other, strict=False))
        both = tuple(union_of(a, b, f"{path}[{i}]", capacity) for i, (a, b) in pairs)
        return both + mine[len(both) :] + other[len(both) :]
    if isinstance(mine, Sizes):
        merged = {
            f.name: union_of(
                getattr(mine, f.name),
                getattr(other, f.name),
                f"{path}.{f.name}",
                "capacity" in f.metadata,
            )
            for f in dataclasses.fields(mine)
        }
        return dataclasses.replace(mine, **merged)
    if not capacity and mine != other:
        raise ValueError(f"no spec covers both: {path} is {mine} in one and {other} in the other")
    return max(mine, other)
