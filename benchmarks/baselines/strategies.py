"""The strategies by name."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from baselines import collectives, layouts, tables
from baselines.base import Problem, Strategy
from baselines.hybrid import Hybrid
from magi_jax.solver.dispatch import Layout

NODE = 8  # ranks that share a fast link
# The hybrid strategy with groups as large as documents need, and with ones twice and four times as large,
# with which ranks hold equal tokens but for a twentieth.
HYBRIDS = {"hybrid": (1, 1.5), "hybrid_even2": (2, 1.05), "hybrid_even4": (4, 1.05)}


@dataclass(frozen=True)
class HeadRing(Strategy):
    """Heads over the last axis, and two rings of keys and values over the others.

    One class for Ulysses (heads alone; arXiv 2309.14509), ring attention (one ring), USP (heads and a ring;
    arXiv 2405.07719) and LoongTrain's double ring (arXiv 2406.18485).

    Attributes:
        sharding: of the sequence over the ranks of the rings: contiguous, zigzag or documents.
    """

    sharding: str

    @property
    def heads(self) -> int:
        """Ranks that share out the heads of the same rows."""
        return self.axes[-1][1]

    def layout(self, problem: Problem) -> Layout:
        """See `Strategy.layout`."""
        groups = self.num_ranks // self.heads
        if self.sharding == "documents":
            whole = layouts.zigzag_documents(problem.lengths, groups)
        else:
            make = {"contiguous": layouts.contiguous, "zigzag": layouts.zigzag}[self.sharding]
            whole = make(problem.mask.q_len, groups)
        return layouts.split_evenly(whole, self.heads)

    def sources(self) -> np.ndarray:
        """Group whose keys a group reads in each step, ``[groups, steps]``."""
        (_, outer), (_, inner), _ = self.axes
        group, step = np.ogrid[: outer * inner, : outer * inner]
        return (group // inner - step // inner) % outer * inner + (group - step) % inner

    def cells(self, problem: Problem) -> tables.Cells:
        """Slices of group ``g`` in step ``s``: part ``g * steps + s``."""
        layout = layouts.grouped(self.layout(problem), self.heads)
        sources = self.sources()
        groups = len(sources)
        parts = (np.arange(groups)[:, None] * groups + sources).ravel()
        return tables.select(tables.by_owner(problem.mask, layout), parts)

    def buffer_rows(self, problem: Problem) -> int:
        """Rows of queries, and of keys, in a kernel call."""
        return int(layouts.rows_held(self.layout(problem)).max()) * self.heads

    def tables(self, problem: Problem) -> Any:
        """Leaves ``[ranks, steps, ...]``."""
        groups, rows = self.num_ranks // self.heads, self.buffer_rows(problem)
        made = tables.table(self.cells(problem), groups * groups, rows, rows)

        def of_ranks(leaf):
            by_group = leaf.reshape(groups, groups, *leaf.shape[1:])
            return np.repeat(by_group, self.heads, axis=0)

        return jax.tree.map(of_ranks, made)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        """See `Strategy.attend`."""
        outer, inner, (axis, size) = self.axes
        q, k, v = (collectives.to_heads(x, axis, size) for x in (q, k, v))
        out = collectives.double_ring(q, (k, v), tables, dict([outer, inner]))
        return collectives.to_rows(out, axis, size)


@dataclass(frozen=True)
class AllGather(Strategy):
    """Keys and values of all ranks at once, queries where they are (Llama 3, arXiv 2407.21783, 3.3.2).

    Attributes:
        sharding: zigzag or documents.
    """

    sharding: str

    def layout(self, problem: Problem) -> Layout:
        """See `Strategy.layout`."""
        if self.sharding == "documents":
            return layouts.zigzag_documents(problem.lengths, self.num_ranks)
        return layouts.zigzag(problem.mask.q_len, self.num_ranks)

    def cells(self, problem: Problem) -> tables.Cells:
        """Slices of rank ``r``, keys in global order."""
        return tables.all_keys(problem.mask, self.layout(problem))

    def tables(self, problem: Problem) -> Any:
        """Kernel tables, where each global key lies among the gathered ones, and the inverse of that."""
        layout = self.layout(problem)
        place = layouts.positions(layout)
        made = tables.table(self.cells(problem), self.num_ranks, place.shape[1], problem.mask.k_len)
        key_of_row = place.reshape(1, -1)
        order = layouts.inverse(key_of_row, problem.mask.k_len)
        both = order, key_of_row.astype(np.int32)
        return made, *(np.tile(index, (self.num_ranks, 1)) for index in both)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        """See `Strategy.attend`."""
        table, *order = tables
        ((axis, _),) = self.axes
        k, v = (
            collectives.rearrange(jax.lax.all_gather(x, axis, tiled=True), *order) for x in (k, v)
        )
        return collectives.flex_flash_attention(q, k, v, table)


def make(name: str, num_ranks: int, node: int = NODE) -> Strategy:
    """The strategy of a name for a number of ranks, shaped for nodes of ``node`` ranks.

    Raises:
        ValueError: there is none of that name.
    """
    near = min(node, num_ranks)
    far = num_ranks // near
    pair = 2 if near % 2 == 0 else 1
    shapes = {  # outer ring, inner ring, heads
        "ulysses": (1, 1, num_ranks),
        "ring": (1, num_ranks, 1),
        "usp": (1, far, near) if far > 1 else (1, pair, near // pair),
        "loongtrain": (far, near // pair, pair),
    }
    base, _, sharding = name.partition("_")
    if base == "ulysses" and not sharding:
        sharding = "contiguous"
    if base in shapes and sharding in ("contiguous", "zigzag", "documents"):
        axes = tuple(zip(("outer", "inner", "heads"), shapes[base], strict=True))
        return HeadRing(name, axes, sharding)
    if base == "allgather" and sharding in ("zigzag", "documents"):
        return AllGather(name, (("ranks", num_ranks),), sharding)
    if name in HYBRIDS:
        return Hybrid(name, (("ranks", num_ranks),), *HYBRIDS[name])
    raise ValueError(f"no strategy is called {name!r}; names() lists them")


def names() -> tuple[str, ...]:
    """Names of all strategies."""
    ring_like = [f"{base}_{s}" for base in ("usp", "loongtrain") for s in ("zigzag", "documents")]
    rings = [f"ring_{s}" for s in ("contiguous", "zigzag", "documents")]
    gathers = ["allgather_zigzag", "allgather_documents"]
    return ("ulysses", *rings, *gathers, *ring_like, *HYBRIDS)
