"""The tables that a plan is made of: pytrees whose leaves are int32 and whose sizes are static.

Inside a plan every leaf has a leading ``[cp]`` axis; ``local(rank)`` strips it. `stack_plans` puts
a replica axis in front of that.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from magi_jax.plan.comm_spec import CommSpec, StepSpec, TwoLevelSpec
from magi_jax.plan.part_specs import TableSpec
from magi_jax.solver.slice_table import TileRuns

PEER, SRC_ROW, DST_ROW, N_ROWS, SLOT = range(5)
GLOBAL_START, LOCAL_START, SEGMENT_ROWS = range(3)

Array = Any  # a NumPy array while planning, a jax.Array on a device, a tracer under jit


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class SliceTable:
    """What an attention kernel reads; see docs/architecture.md, "Slice table".

    Attributes:
        slices: ``[A, 6]`` tight slices in local coordinates; zero rows are padding.
        by_query: walk of query tiles along keys.
        by_key: walk of key tiles along queries.
        q_len, k_len: static; rows of the query and key buffers that the table was made for.
        tile_size: static; rows of a tile.
    """

    slices: Array
    by_query: TileRuns
    by_key: TileRuns
    q_len: int = dataclasses.field(metadata={"static": True})
    k_len: int = dataclasses.field(metadata={"static": True})
    tile_size: int = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        # Not the entries, which would fill the screen, nor anything of theirs: they may be traced or None.
        return f"SliceTable(q_len={self.q_len}, k_len={self.k_len}, tile_size={self.tile_size})"

    @property
    def spec(self) -> TableSpec:
        """Its sizes: `slice_table` lays other masks out in them, or in what several of them have united
        (`TableSpec.union`) and scaled (`TableSpec.scaled`), so that one program serves all.
        """
        return TableSpec(
            self.q_len,
            self.k_len,
            self.tile_size,
            slices=self.slices.shape[-2],
            query_runs=self.by_query.runs.shape[-2],
            query_ids=self.by_query.ids.shape[-1],
            key_runs=self.by_key.runs.shape[-2],
            key_ids=self.by_key.ids.shape[-1],
        )

    def local(self, rank: Array, cp_size: int) -> "SliceTable":
        """The table of one rank, without the ``[cp]`` axis."""
        return local_part(self, rank, cp_size, lead=self.slices.ndim - 2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CommMeta:
    """Rows that move between ranks; see docs/architecture.md, "Plan".

    Attributes:
        send: ``[cp, L, 5]`` rows ``(peer, src_row, dst_row, n_rows, slot)``, sorted by (peer,
            slot).
        recv: ``[cp, L, 5]`` the same pieces seen by the receiver, sorted by ``dst_row``.
        spec: static sizes.
    """

    send: Array
    recv: Array
    spec: CommSpec = dataclasses.field(metadata={"static": True})

    @property
    def src_rows(self) -> int:
        """Rows of the local input."""
        return self.spec.src_rows

    @property
    def dst_rows(self) -> int:
        """Rows of the received buffer."""
        return self.spec.dst_rows

    @property
    def pair_rows(self) -> int:
        """Rows of the block of each ordered pair of different ranks."""
        return self.spec.pair_rows

    @property
    def self_rows(self) -> int:
        """Most rows that a rank copies to itself; 0 when none ever is."""
        return self.spec.self_rows

    @property
    def steps(self) -> "tuple[CommMeta, ...]":
        """The transfers that this one is made of: itself."""
        return (self,)

    def local(self, rank: Array) -> "CommMeta":
        """The pieces of one rank, ``[L, 5]``, whether the leaves arrive sharded or whole."""
        return local_part(self, rank, self.spec.cp_size, lead=self.send.ndim - 2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TwoLevelComm:
    """A transfer in two steps, so that no row crosses a border between nodes twice; see
    docs/architecture.md, "Plan".

    Attributes:
        across: rows to their relays, each once per node that needs it; rows that ranks of the owner's
            own node need are copied at the owner.
        within: rows from the relays' buffers to the ranks that need them.
        ranks_per_node: static.
    """

    across: CommMeta
    within: CommMeta
    ranks_per_node: int = dataclasses.field(metadata={"static": True})

    @property
    def src_rows(self) -> int:
        """Rows of the local input."""
        return self.across.src_rows

    @property
    def dst_rows(self) -> int:
        """Rows of the received buffer."""
        return self.within.dst_rows

    @property
    def steps(self) -> tuple[CommMeta, ...]:
        """The transfers that this one is made of, in order."""
        return self.across, self.within

    @property
    def spec(self) -> TwoLevelSpec:
        """Static sizes."""
        first, second = self.across.spec, self.within.spec
        return TwoLevelSpec(
            first.cp_size,
            self.ranks_per_node,
            first.src_rows,
            first.dst_rows,
            second.dst_rows,
            StepSpec(first.pair_rows, first.self_rows, first.pieces),
            StepSpec(second.pair_rows, second.self_rows, second.pieces),
        )

    def local(self, rank: Array) -> "TwoLevelComm":
        """The pieces of one rank, whether the leaves arrive sharded or whole."""
        return TwoLevelComm(self.across.local(rank), self.within.local(rank), self.ranks_per_node)


AnyComm = CommMeta | TwoLevelComm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SharedTables:
    """Own keys of a rank whose whole gradient comes back from the buffers of late queries.

    Attributes:
        rows: ``[cp, E]`` their local rows; padding is past the end, no row.
        comm: the transfer of the late queries' keys, with rows of ``rows`` for local ones.
    """

    rows: Array
    comm: CommMeta


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LateTables:
    """Query tiles that are computed last and at once, with all their keys in one buffer.

    Attributes:
        comm: fills the buffer of their keys, those of the rank itself included.
        calc: all queries of the rank against that buffer; tiles without runs are not late.
        shared: of the backward pass, keys of which stage 0 gives no gradient; None in the forward pass,
            where it would.
    """

    comm: CommMeta
    calc: SliceTable
    shared: SharedTables | None = None

    @property
    def num_rows(self) -> np.ndarray:
        """Rows of the late tiles of each rank, int64 ``[cp]``, of a plan that has values."""
        calc = self.calc
        is_late = np.diff(np.asarray(calc.by_query.ptr), axis=-1) > 0
        begin = np.arange(is_late.shape[-1]) * calc.tile_size
        return is_late @ np.clip(calc.q_len - begin, 0, calc.tile_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class StageTables:
    """What the stages of one direction read.

    Attributes:
        calc: slice table of each stage; stage 0 reads local keys, stage ``i + 1`` what ``comm[i]``
            brought.
        comm: rows that stage ``i + 1`` receives, in one step or in two.
        late: queries that are in no stage; None where there are none.
        first: of the backward pass, some queries against own keys, which come before the first remote stage
            and hide its fetch; stage 0 has the others. None where it has all.
    """

    calc: tuple[SliceTable, ...]
    comm: tuple[AnyComm, ...]
    late: LateTables | None = None
    first: SliceTable | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TravelTables:
    """Query rows that go to the owners of their keys, and what is computed there.

    Attributes:
        comm: casts query rows to the ranks that own keys they see; partial results return by its
            transpose.
        calc: those rows (queries, in the order of the received buffer) against local keys.
    """

    comm: AnyComm
    calc: SliceTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DispatchMeta:
    """Where each token lives.

    Attributes:
        segments: ``[cp, G, 3]`` rows ``(global_start, local_start, n_rows)``, in global and in
            local order; padding has ``n_rows == 0``.
        positions: ``[cp, local_len]`` global position of each local row, -1 = padding.
        transfer: from the contiguous layout (rank ``r`` holds ``ceil(seq_len / cp)`` rows from
            ``r * ceil(seq_len / cp)``) to the dispatched one.
    """

    segments: Array
    positions: Array
    transfer: CommMeta


def local_part(tree: Any, rank: Array, cp_size: int, lead: int) -> Any:
    """Strips the leading axes of every leaf of ``tree`` for one rank.

    Args:
        tree: any pytree whose leaves share ``lead`` leading axes: ``[cp]`` or ``[replicas, cp]``.
        rank: index along the cp axis, a Python integer or a traced scalar (``axis_index``).
        cp_size: number of ranks.
        lead: number of leading axes; 0 returns ``tree`` as it is (it is local already).

    Raises:
        ValueError: the cp axis is neither sharded (1) nor whole (``cp_size``), or a replica axis
            has not been sharded down to 1.
    """
    if lead == 0:
        return tree
    if lead > 2:
        raise ValueError(f"expected leading axes [cp] or [replicas, cp], got {lead} of them")

    def strip(leaf):
        if lead == 2:
            if leaf.shape[0] != 1:
                raise ValueError(
                    f"a stacked plan has {leaf.shape[0]} replicas here; shard its first axis over"
                    f" the batch axis so that each rank sees one (leaf shape {leaf.shape})"
                )
            leaf = leaf[0]
        if leaf.shape[0] == 1:
            return leaf[0]
        if leaf.shape[0] != cp_size:
            raise ValueError(
                f"a plan leaf has {leaf.shape[0]} ranks on its leading axis, 1 (sharded) or"
                f" {cp_size} (whole) is needed (leaf shape {leaf.shape})"
            )
        return jax.lax.dynamic_index_in_dim(leaf, rank, axis=0, keepdims=False)

    return jax.tree.map(strip, tree)
