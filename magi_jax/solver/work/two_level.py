"""A transfer in two steps, so that no row crosses a border between nodes twice.

Ranks ``n * ranks_per_node`` to ``(n + 1) * ranks_per_node - 1`` are node ``n``. A row goes to each node
that needs it once, to its *relay* there: the rank with the owner's place in the node (GPUs with the
same place share the rail of a network). In the owner's own node the owner is the relay, and keeps a
copy. From a buffer at the relay rows then go to all ranks of the node that need them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from magi_jax.solver import intervals
from magi_jax.solver.engine import compiled
from magi_jax.solver.work.remote import Remote
from magi_jax.solver.work.transfer import Pieces


class TwoSteps(NamedTuple):
    """Pieces of both steps.

    Attributes:
        across: from owners to relays; ``dst_row`` is a row of the relay's buffer.
        within: from relays to ranks of their node; ``src_row`` is a row of that buffer.
    """

    across: Pieces
    within: Pieces


def relay_of(src: np.ndarray, dst: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """The rank that passes rows of ``src`` on to ``dst``."""
    return dst // ranks_per_node * ranks_per_node + src % ranks_per_node


def split(pieces: Pieces, ranks_per_node: int, cp_size: int, engine: str = "numpy") -> TwoSteps:
    """Splits a transfer in two; the rows of a relay's buffer are in the order of (owner, row).

    Args:
        pieces: what moves.
        ranks_per_node: ranks of a node.
        cp_size: number of ranks.
        engine: "numpy" or "compiled"; both find the same.
    """
    if engine == "compiled":
        across, within = compiled().split_steps(*pieces, cp_size, ranks_per_node)
        return TwoSteps(Pieces(*across), Pieces(*within))
    relay = relay_of(pieces.src, pieces.dst, ranks_per_node)
    # Stretches of rows of one owner for one node that touch or overlap become one.
    way = relay * cp_size + pieces.src
    group, begin, end = intervals.union(way, pieces.src_row, pieces.src_row + pieces.n_rows)
    at, owner = group // cp_size, group % cp_size
    place = intervals.offsets(at, end - begin, cp_size)
    span = int(end.max(initial=0)) + 1
    stretch = np.searchsorted(group * span + begin, way * span + pieces.src_row, side="right") - 1
    row = place[stretch] + pieces.src_row - begin[stretch]
    return TwoSteps(
        Pieces(owner, at, begin, place, end - begin),
        Pieces(relay, pieces.dst, row, pieces.dst_row, pieces.n_rows),
    )


def joined(steps: TwoSteps) -> Pieces:
    """The transfer from owners to ranks that two steps make together: `split` undone."""
    across, within = steps
    order = np.lexsort((across.dst_row, across.dst))
    across = Pieces(*(column[order] for column in across))
    end, last = across.dst_row + across.n_rows, within.src_row + within.n_rows
    span = int(max(end.max(initial=0), last.max(initial=0))) + 1
    source, stretch = intervals.meet(
        within.src * span + within.src_row,
        within.src * span + last,
        across.dst * span + across.dst_row,
        across.dst * span + end,
    )
    first = np.maximum(within.src_row[source], across.dst_row[stretch])
    n_rows = np.minimum(last[source], end[stretch]) - first
    return Pieces(
        across.src[stretch],
        within.dst[source],
        across.src_row[stretch] + first - across.dst_row[stretch],
        within.dst_row[source] + first - within.src_row[source],
        n_rows,
    )


def split_stages(
    remote: Remote, num_stages: int, cp_size: int, ranks_per_node: int, turned: bool = False
) -> Remote:
    """Cuts the distinct rows of each node into ``num_stages`` stages of nearly equal size; a buffer is in
    global order.

    `remote.split_stages` cuts each rank's rows by themselves, so that ranks of a node may ask for one row in
    different stages, and it would cross once for each of them.

    Args:
        remote: ranges that travel, all in one stage.
        num_stages: how many stages.
        cp_size: number of ranks.
        ranks_per_node: ranks of a node.
        turned: whether each node goes round the sequence from a place of its own.
    """
    num_nodes = cp_size // ranks_per_node
    node, size = remote.dst // ranks_per_node, remote.end - remote.begin
    group, begin, end = intervals.union(node, remote.begin, remote.end)
    rows = np.bincount(group, end - begin, num_nodes).astype(np.int64)[:, None]
    place = intervals.offsets(group, end - begin, num_nodes)
    span = int(end.max(initial=0)) + 1
    found = np.searchsorted(group * span + begin, node * span + remote.begin, side="right") - 1
    first = place[found] + remote.begin - begin[found]  # among the rows of the node

    steps = rows * np.arange(num_stages) // num_stages
    start = rows * np.arange(num_nodes)[:, None] // num_nodes * turned
    modulus = np.maximum(rows, 1)
    edges = np.sort(np.append(np.zeros_like(rows), (start + steps) % modulus, axis=1), axis=1)
    from_start = (edges - start) % modulus
    stage = (steps[:, None, :] <= from_start[:, :, None]).sum(axis=2) - 1
    base = np.cumsum(rows) - rows[:, 0]
    cells = np.append((base[:, None] + edges).ravel(), rows.sum())
    full = np.flatnonzero(np.diff(cells) > 0)
    lifted = base[node] + first
    source, cell = intervals.meet(lifted, lifted + size, cells[full], cells[full + 1])
    cell = full[cell]
    low = np.maximum(lifted[source], cells[cell])
    n_rows = np.minimum((lifted + size)[source], cells[cell + 1]) - low
    skipped = low - lifted[source]
    stage_of = stage.ravel()[cell]
    key = remote.dst[source] * num_stages + stage_of
    order = np.argsort(key, kind="stable")
    dst_row = np.empty_like(n_rows)
    dst_row[order] = intervals.offsets(key[order], n_rows[order], cp_size * num_stages)
    return Remote(
        dst=remote.dst[source],
        src=remote.src[source],
        begin=remote.begin[source] + skipped,
        end=remote.begin[source] + skipped + n_rows,
        src_row=remote.src_row[source] + skipped,
        stage=stage_of,
        dst_row=dst_row,
    )


def is_near(remote: Remote, ranks_per_node: int) -> np.ndarray:
    """Of each range, whether it stays in its node, bool ``[R]``."""
    return remote.src // ranks_per_node == remote.dst // ranks_per_node


def split_by_node(
    remote: Remote, near: Sequence[bool], cp_size: int, ranks_per_node: int
) -> Remote:
    """Cuts rows of the receivers' own nodes into stages of nearly equal size, and all others into other
    stages, each as `split_stages` does.

    Args:
        remote: ranges that travel, all in one stage.
        near: of each stage, whether it has the rows of own nodes or the others.
        cp_size: number of ranks.
        ranks_per_node: ranks of a node.

    Raises:
        ValueError: there are rows of a kind without stages.
    """
    near_rows = is_near(remote, ranks_per_node)
    parts = []
    for kind in (True, False):
        rows = Remote(*(column[near_rows == kind] for column in remote))
        stages = np.flatnonzero(np.asarray(near, bool) == kind)
        if len(stages):
            cut = split_stages(rows, len(stages), cp_size, ranks_per_node)
            parts.append(cut._replace(stage=stages[cut.stage]))
        elif len(rows.dst):
            raise ValueError(
                f"no stage of near={tuple(near)} has rows of {'own' if kind else 'other'} nodes,"
                f" of which there are {int((rows.end - rows.begin).sum())}"
            )
    found = Remote(*map(np.concatenate, zip(*parts, strict=True)))
    order = np.lexsort((found.begin, found.dst))
    return Remote(*(column[order] for column in found))


def traffic(
    remote: Remote, num_stages: int, cp_size: int, ranks_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows that each stage moves between ranks in both steps, int64 ``[S, cp, cp]`` each; copies that a
    rank keeps are left out.
    """
    relay = relay_of(remote.src, remote.dst, ranks_per_node)
    stage = remote.stage * cp_size
    way = (stage + remote.src) * cp_size + relay
    end = remote.src_row + remote.end - remote.begin
    group, begin, end = intervals.union(way, remote.src_row, end)
    steps = (
        (group, end - begin),
        ((stage + relay) * cp_size + remote.dst, remote.end - remote.begin),
    )
    counts = []
    for pair, rows in steps:
        moved = np.bincount(pair, rows, num_stages * cp_size * cp_size)
        moved = moved.reshape(num_stages, cp_size, cp_size).astype(np.int64)
        moved[:, np.arange(cp_size), np.arange(cp_size)] = 0
        counts.append(moved)
    return counts[0], counts[1]
