"""Group collectives in two steps, so that no row crosses a border between nodes twice.

Ranks ``n * ranks_per_node`` to ``(n + 1) * ranks_per_node - 1`` are node ``n``. A row that ranks of
another node need goes there once, to the rank with the sender's place in the node (GPUs with the
same place share the rail of a network), and from there over the node's own link to those who need
it. A reduce takes the same way back: sums are made in the node before anything leaves it.

Both steps are ordinary transfers, so every transport serves them and derivatives are theirs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.comm.group_collectives import group_cast, group_reduce
from magi_jax.comm.transport import Transport
from magi_jax.plan import CommMeta, CommSpec
from magi_jax.plan.lay_out import comm_meta
from magi_jax.plan.tables import DST_ROW, N_ROWS, PEER, SRC_ROW
from magi_jax.solver.transfer import Pieces


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TwoLevelComm:
    """A transfer in two steps.

    Attributes:
        across: rows between nodes, each once per node that needs it.
        within: rows inside nodes; its source is the local rows, then what ``across`` brought.
        ranks_per_node: static.
    """

    across: CommMeta
    within: CommMeta
    ranks_per_node: int = dataclasses.field(metadata={"static": True})


def two_level(comm: CommMeta, ranks_per_node: int) -> TwoLevelComm:
    """Splits a concrete transfer with leaves ``[cp, L, 5]`` into two steps of the same effect.

    Raises:
        ValueError: nodes do not divide the ranks.
    """
    spec = comm.spec
    if ranks_per_node < 1 or spec.cp_size % ranks_per_node:
        raise ValueError(
            f"{spec.cp_size} ranks are not whole nodes of {ranks_per_node}: ranks_per_node must"
            " divide them"
        )
    pieces = _pieces(comm)
    source, target = pieces.src // ranks_per_node, pieces.dst // ranks_per_node
    far = source != target
    crossing = Pieces(*(column[far] for column in pieces))
    across, begins = _once_per_node(crossing, ranks_per_node)
    sizes = CommSpec(spec.cp_size, spec.src_rows, 0, 0, 0, 0)
    first = comm_meta(across, sizes, None, "across", "numpy")
    forwarded = Pieces(
        target[far] * ranks_per_node + crossing.src % ranks_per_node,
        crossing.dst,
        spec.src_rows + begins,
        crossing.dst_row,
        crossing.n_rows,
    )
    near = (np.concatenate([c[~far], f]) for c, f in zip(pieces, forwarded, strict=True))
    sizes = CommSpec(spec.cp_size, spec.src_rows + first.dst_rows, spec.dst_rows, 0, 0, 0)
    return TwoLevelComm(
        first, comm_meta(Pieces(*near), sizes, None, "within", "numpy"), ranks_per_node
    )


def two_level_cast(
    x: Any, comm: TwoLevelComm, axis_name: str, *, transport: str | Transport | None = None
) -> Any:
    """`group_cast` in two steps; arguments, result and errors are those of `group_cast`."""
    crossed = group_cast(x, comm.across, axis_name, transport=transport)
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), x, crossed)
    return group_cast(whole, comm.within, axis_name, transport=transport)


def two_level_reduce(
    y: Any,
    comm: TwoLevelComm,
    axis_name: str,
    *,
    wire_dtype: Any = None,
    out_dtype: Any = None,
    transport: str | Transport | None = None,
) -> Any:
    """`group_reduce` of sums in two steps; arguments and result are those of `group_reduce`.

    Sums of a node travel in ``wire_dtype`` too; None keeps them in float32.
    """
    options = {"wire_dtype": wire_dtype, "transport": transport}
    whole = group_reduce(y, comm.within, axis_name, out_dtype=jnp.float32, **options)
    rows = comm.across.src_rows
    crossed = jax.tree.map(lambda leaf: leaf[rows:], whole)
    returned = group_reduce(crossed, comm.across, axis_name, out_dtype=jnp.float32, **options)
    return jax.tree.map(
        lambda part, near, far: (near[:rows] + far).astype(out_dtype or part.dtype),
        y,
        whole,
        returned,
    )


def rows_between(comm: CommMeta) -> np.ndarray:
    """Rows that move from each rank (first axis) to each other, ``[cp, cp]``, of a concrete transfer."""
    pieces, size = _pieces(comm), comm.spec.cp_size
    counts = np.bincount(pieces.src * size + pieces.dst, pieces.n_rows, size * size)
    return counts.reshape(size, size).astype(np.int64)


def _pieces(comm: CommMeta) -> Pieces:
    table = np.asarray(comm.send)
    src, index = np.nonzero(table[..., N_ROWS] > 0)
    found = table[src, index].astype(np.int64)
    return Pieces(src, found[:, PEER], found[:, SRC_ROW], found[:, DST_ROW], found[:, N_ROWS])


def _once_per_node(pieces: Pieces, ranks_per_node: int) -> tuple[Pieces, np.ndarray]:
    """Rows that cross, each once per node, and where those of each piece lie at the rank that gets
    them.
    """
    rank = pieces.dst // ranks_per_node * ranks_per_node + pieces.src % ranks_per_node
    # Stretches of rows of one source for one node that touch or overlap become one.
    way = pieces.src * (int(rank.max(initial=0)) + 1) + rank
    order = np.lexsort((pieces.src_row, way))
    way, rank, src = way[order], rank[order], pieces.src[order]
    begin, end = pieces.src_row[order], (pieces.src_row + pieces.n_rows)[order]
    step = int(end.max(initial=0)) + 1  # ways lie apart on one line
    reach = np.maximum.accumulate(end + way * step) if len(way) else end
    opens = np.ones(len(way), bool)
    opens[1:] = begin[1:] + way[1:] * step > reach[:-1]
    stretch = np.cumsum(opens) - 1
    count = int(opens.sum())
    last = np.zeros(count, np.int64)
    np.maximum.at(last, stretch, end)
    n_rows = last - begin[opens]
    # At the receiver, stretches follow each other.
    place = np.zeros(count, np.int64)
    by_rank = np.argsort(rank[opens], kind="stable")
    before = np.cumsum(n_rows[by_rank]) - n_rows[by_rank]
    firsts = np.searchsorted(rank[opens][by_rank], rank[opens][by_rank])
    place[by_rank] = before - before[firsts] if count else before
    across = Pieces(src[opens], rank[opens], begin[opens], place, n_rows)
    begins = np.empty(len(way), np.int64)
    begins[order] = place[stretch] + begin - begin[opens][stretch]
    return across, begins
