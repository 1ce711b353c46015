"""What each rank computes in each step of a strategy, as pieces that are timed once each."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from baselines import layouts, strategies, tables
from baselines.base import Problem
from baselines.hybrid import Hybrid

from magi_jax.masks import algebra, bands
from magi_jax.plan import AttentionPlan, PlanConfig, make_plan
from magi_jax.plan.tables import N_ROWS, PEER, AnyComm, CommMeta, StageTables
from magi_jax.solver.cost.model import CostModel

NODE = 8  # GPUs that share a fast link
NEAR_GBPS, FAR_GBPS = 450.0, 50.0  # what a GPU receives inside a node and across nodes
NEAR_LATENCY_US, FAR_LATENCY_US = 10.0, 20.0
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 8, 128
FLOPS_PER_PAIR = {"forward": 4, "backward": 10}  # times heads and head dim
OURS = "magi_jax"
ALIKE = "magi_jax_alike"  # planned ahead; keys kept and gradients sent as those of the others are
MOST_SLICES = 200_000  # of all steps of a strategy, past which it is left out
PARTIAL, ADDING = ("first", "merged"), ("merged", "late")  # results of pieces
FEW = 16  # slices of a mask that it is worth bringing into one form


class Piece(NamedTuple):
    """One kernel call: a mask in local coordinates, and the sizes of its operands.

    Attributes:
        slices: tight rows ``[A, 6]``, int32.
        q_len, k_len: rows of the queries and of the keys.
        heads, kv_heads: of the call.
        result: "final", `out` and all gradients in bfloat16; "first" of several calls, in float32; "merged",
            the same added by the kernel itself to those of earlier calls, in the backward pass dQ alone;
            "late", added likewise, in bfloat16.
    """

    slices: np.ndarray
    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    result: str = "final"

    @property
    def key(self) -> str:
        """Names the piece in result files: equal pieces have equal names."""
        digest = hashlib.sha256(np.ascontiguousarray(self.slices, "<i4").tobytes())
        digest.update(repr(tuple(self[1:])).encode())
        return digest.hexdigest()[:16]

    @property
    def area(self) -> int:
        """Visible pairs."""
        return int(bands.area(self.slices.astype(np.int64)).sum())


class Work(NamedTuple):
    """A strategy on one problem.

    Attributes:
        calls: names of pieces of the forward pass, "" where there is nothing to do, ``[groups, steps]``;
            ranks of a group do the same on other heads.
        backward_calls: those of the backward pass, ``[groups, steps]``.
        rows: rows of each rank's buffer.
        traffic, backward_traffic: rows that move in each remote stage in one step, or in two where they
            cross between nodes once, ``[stages, steps, ranks, ranks]``; of our plans only. Late queries count
            as a stage.
        late_rows, backward_late_rows: most query rows of a rank that are late, 0 where there are stages
            instead.
        travel_calls: the piece of each rank that serves travelling queries, ``[ranks]``, if any travel.
        travel_traffic: query rows that travel, ``[steps, ranks, ranks]``.
        level_sizes, level_rows: group size and rows of each step of the hybrid strategy.
        alike: whether the backward pass has kept its keys and sends bfloat16; of our plans only.
        near, backward_near: where rows take two steps, whether those of each stage take the second alone.
    """

    calls: np.ndarray
    backward_calls: np.ndarray
    rows: int
    traffic: np.ndarray | None = None
    backward_traffic: np.ndarray | None = None
    late_rows: int = 0
    backward_late_rows: int = 0
    travel_calls: np.ndarray | None = None
    travel_traffic: np.ndarray | None = None
    level_sizes: tuple[int, ...] = ()
    level_rows: tuple[int, ...] = ()
    alike: bool = False
    near: tuple[bool, ...] = ()
    backward_near: tuple[bool, ...] = ()


def strategy_names(problem: Problem, num_ranks: int) -> list[str]:
    """Ours and the strategies that are worth looking at for a problem."""
    documents = len(problem.lengths)
    names = [OURS, ALIKE]
    for name in strategies.names():
        by_document = name.endswith("documents") or name in strategies.HYBRIDS
        if by_document and documents == 1:
            continue  # the same as zigzag
        groups = _rings(name, num_ranks)
        if name.endswith("documents") and documents * (2 * groups) ** 2 > MOST_SLICES:
            continue
        names.append(name)
    return names


def _rings(name: str, num_ranks: int) -> int:
    """Ranks of the rings of a strategy, or all of them."""
    strategy = strategies.make(name, num_ranks, NODE)
    heads = strategy.heads if isinstance(strategy, strategies.HeadRing) else 1
    return num_ranks // heads


def make_work(name: str, problem: Problem, num_ranks: int, pieces: dict[str, Piece]) -> Work:
    """The work of one strategy; its pieces are added to ``pieces``."""
    if name.startswith(OURS):
        plan = _our_plan(problem, num_ranks, name == ALIKE)
        return our_work(plan, num_ranks, pieces, name == ALIKE)
    strategy = strategies.make(name, num_ranks, NODE)
    if isinstance(strategy, strategies.HeadRing):
        rows, groups = strategy.buffer_rows(problem), num_ranks // strategy.heads
        heads = max(NUM_HEADS // strategy.heads, 1), max(NUM_KV_HEADS // strategy.heads, 1)
        names = _add(pieces, strategy.cells(problem), groups * groups, (rows, rows, *heads))
        names = names.reshape(groups, groups)
        return Work(names, names, rows // strategy.heads)
    if isinstance(strategy, strategies.AllGather):
        rows = int(layouts.rows_held(strategy.layout(problem)).max())
        sizes = rows, problem.mask.k_len, NUM_HEADS, NUM_KV_HEADS
        names = _add(pieces, strategy.cells(problem), num_ranks, sizes)
        return Work(names[:, None], names[:, None], rows)
    return _hybrid_work(strategy, problem, pieces)


def _our_plan(problem: Problem, num_ranks: int, alike: bool) -> AttentionPlan:
    rates = CostModel(
        link_gbps=NEAR_GBPS,
        node_link_gbps=FAR_GBPS,
        latency_us=FAR_LATENCY_US if num_ranks > NODE else NEAR_LATENCY_US,
        grad_bytes=2 if alike else 4,
    )
    effort = "high" if alike else "fast"
    config = PlanConfig(ranks_per_node=min(NODE, num_ranks), effort=effort, cost_model=rates)
    return make_plan(problem.mask, num_ranks, config)


def _forward_kinds(stages: StageTables, travels: bool) -> list[str]:
    """Results of the calls of the forward pass, late queries last; see `Piece`."""
    remote = len(stages.calc) - 1
    own = "first" if remote or travels else "final"
    late = [] if stages.late is None else ["late" if own == "final" else "merged"]
    return [own, *["merged"] * remote, *late]


def _backward_kinds(stages: StageTables, travels: bool) -> list[str]:
    """The same of the backward pass, in which own keys are the last to be computed."""
    remote, late = len(stages.calc) - 1, stages.late
    others = ["merged"] * remote  # all add to a dQ that was cleared before
    if late is not None:
        others.append("merged" if remote else "first")
    whole = not remote and not travels and (late is None or late.shared is not None)
    own = ("late" if whole else "merged") if others else ("final" if whole else "first")
    return [own, *others]


def our_work(
    plan: AttentionPlan, num_ranks: int, pieces: dict[str, Piece], alike: bool = False
) -> Work:
    """The work of a plan; its pieces are added to ``pieces``."""

    def calls_of(stages: StageTables, backward: bool) -> np.ndarray:
        kinds = (_backward_kinds if backward else _forward_kinds)(stages, plan.travel is not None)
        calc = [*stages.calc, *([] if stages.late is None else [stages.late.calc])]
        names = []
        for table, result in zip(calc, kinds, strict=True):
            sizes = table.q_len, table.k_len, NUM_HEADS, NUM_KV_HEADS, result
            names.append(_add(pieces, _cells_of(table), num_ranks, sizes))
        return np.stack(names, axis=1)

    def late_rows(stages: StageTables) -> int:
        if stages.late is None:
            return 0
        return int(stages.late.num_rows.max())

    # Who keeps keys walks the stages in which they came.
    directions = plan.forward_stages, plan.forward_stages if alike else plan.backward_stages
    comms = [
        stages.comm if stages.late is None else (*stages.comm, stages.late.comm)
        for stages in directions
    ]
    calls = [calls_of(stages, backward) for backward, stages in enumerate(directions)]
    work = Work(*calls, plan.spec.local_len, *(_traffic_of(comm, num_ranks) for comm in comms))
    forward_late, backward_late = map(late_rows, directions)
    work = work._replace(late_rows=forward_late, backward_late_rows=backward_late, alike=alike)
    work = work._replace(near=_near_of(comms[0]), backward_near=_near_of(comms[1]))
    if plan.travel is None:
        return work
    table = plan.travel.calc
    sizes = table.q_len, table.k_len, NUM_HEADS, NUM_KV_HEADS, "first"
    names = _add(pieces, _cells_of(table), num_ranks, sizes)
    return work._replace(
        travel_calls=names, travel_traffic=_traffic_of([plan.travel.comm], num_ranks)[0]
    )


def _hybrid_work(strategy: Hybrid, problem: Problem, pieces: dict[str, Piece]) -> Work:
    levels = strategy.tables(problem)
    calls = []
    for level in levels:
        sizes = level.rows.shape[1], level.key_order.shape[1], NUM_HEADS, NUM_KV_HEADS
        calls.append(_add(pieces, _cells_of(level.table), strategy.num_ranks, sizes))
    names = np.stack(calls, axis=1)
    return Work(
        names,
        names,
        int(layouts.rows_held(strategy.layout(problem)).max()),
        level_sizes=tuple(level.size for level in levels),
        level_rows=tuple(level.rows.shape[1] for level in levels),
    )


def _cells_of(table: Any) -> tables.Cells:
    """The slices of all ranks back from kernel tables."""
    part, entry = np.nonzero(table.slices[..., bands.Q_END] > table.slices[..., bands.Q_START])
    return tables.sorted_cells(table.slices[part, entry].astype(np.int64), part)


def _add(pieces: dict[str, Piece], cells: tables.Cells, num_parts: int, sizes: tuple) -> np.ndarray:
    """Adds the piece of every part that sees anything and names them, ``[num_parts]``."""
    edges = np.searchsorted(cells.part, np.arange(num_parts + 1))
    names = np.full(num_parts, "", dtype="U16")
    for part in np.flatnonzero(np.diff(edges)):
        slices = cells.slices[edges[part] : edges[part + 1]]
        if 1 < len(slices) <= FEW:
            # However the cells were cut, equal masks shall have equal names.
            slices = algebra.merge(slices)
            slices = slices[np.lexsort((slices[:, bands.K_START], slices[:, bands.Q_START]))]
        piece = Piece(slices.astype(np.int32), *sizes)
        names[part] = piece.key
        pieces.setdefault(names[part], piece)
    return names


def _traffic_of(comms: Sequence[AnyComm], num_ranks: int) -> np.ndarray:
    """Rows of each transfer in each step, ``[stages, steps, ranks, ranks]``; those of one among others in
    two are in the second.
    """
    steps = max((len(comm.steps) for comm in comms), default=1)
    traffic = np.zeros((len(comms), steps, num_ranks, num_ranks))
    for moved, comm in zip(traffic, comms, strict=True):
        moved[-len(comm.steps) :] = [_traffic(step, num_ranks) for step in comm.steps]
    return traffic


def _near_of(comms: Sequence[AnyComm]) -> tuple[bool, ...]:
    """Which transfers take one step among others in two."""
    steps = max((len(comm.steps) for comm in comms), default=1)
    return tuple(len(comm.steps) < steps for comm in comms)


def _traffic(meta: CommMeta, num_ranks: int) -> np.ndarray:
    """Rows from each source to each other destination, ``[ranks, ranks]``."""
    send = np.asarray(meta.send, np.int64)
    source, entry = np.nonzero(send[..., N_ROWS])
    moved = send[source, entry]
    result = np.zeros((num_ranks, num_ranks))
    np.add.at(result, (source, moved[:, PEER]), moved[:, N_ROWS])
    return result * ~np.eye(num_ranks, dtype=bool)
