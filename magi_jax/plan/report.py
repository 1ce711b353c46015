"""What a plan costs: balance, rows and bytes that cross ranks, padding; read off its tables."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax.masks import AttnMask, bands
from magi_jax.plan.tables import N_ROWS, PEER, SEGMENT_ROWS, SRC_ROW, CommMeta
from magi_jax.solver import intervals, timeline
from magi_jax.solver.balanced_units import MAX_PARTS, make_units
from magi_jax.solver.bounds import Bounds, gap, lower_bounds
from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.dispatch import DispatchProblem, chunk_edges
from magi_jax.solver.stages import StageSlices
from magi_jax.solver.timeline import Timeline


@dataclass(frozen=True, eq=False)
class PlanReport:
    """Counts of one plan; ``print`` shows them as a table.

    Attributes:
        seq_len: tokens of the sequence.
        local_len: rows of each rank, padding included.
        tokens: ``[cp]`` tokens of each rank.
        area: ``[1 + stages, cp]`` (query, key) pairs that each rank computes in each stage.
        traffic: ``[stages, cp, cp]`` rows that travel from source (first axis) to destination.
        buffer_rows: ``[stages]`` rows of each received buffer, padding included.
        pair_rows: ``[stages]`` rows of the block of each pair in the portable collective.
        redundancy: received rows over distinct ones; 1.0 always.
        planning_ms: time that planning took on the host; None when the plan was transformed since.
        forward, backward: predicted timelines of the stages.
        kernel_us: mean kernel time of a rank, forward and backward together.
        bounds: what no dispatch can beat at this imbalance; None when the report was
            made without the mask.
    """

    seq_len: int
    local_len: int
    tokens: np.ndarray
    area: np.ndarray
    traffic: np.ndarray
    buffer_rows: np.ndarray
    pair_rows: np.ndarray
    redundancy: float
    planning_ms: float | None
    forward: Timeline
    backward: Timeline
    kernel_us: float
    bounds: Bounds | None = None

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return len(self.tokens)

    @property
    def stages(self) -> int:
        """Number of remote stages."""
        return len(self.traffic)

    @property
    def imbalance(self) -> float:
        """Area of the busiest rank over the mean; 1.0 for an empty mask."""
        area = self.area.sum(axis=0)
        return float(area.max() / area.mean()) if area.any() else 1.0

    @property
    def recv_rows(self) -> np.ndarray:
        """Rows that each rank receives, int64 ``[cp]``."""
        return self.traffic.sum(axis=(0, 1))

    @property
    def send_rows(self) -> np.ndarray:
        """Rows that each rank sends, int64 ``[cp]``."""
        return self.traffic.sum(axis=(0, 2))

    @property
    def predicted_us(self) -> float:
        """Predicted time of forward and backward attention on the slowest rank."""
        return self.forward.predicted_us + self.backward.predicted_us

    @property
    def efficiency(self) -> float:
        """Mean kernel time over the predicted time; 1.0 when there is nothing to do."""
        return self.kernel_us / self.predicted_us if self.predicted_us > 0 else 1.0

    @property
    def gap(self) -> float | None:
        """Distance of the worst rank's rows, received or sent, from their lower bound, as a share of the
        bound; None without bounds.
        """
        if self.bounds is None:
            return None
        worst = max(self.recv_rows.max(initial=0), self.send_rows.max(initial=0))
        return gap(float(worst), self.bounds.rank_rows)

    @property
    def ring_rows(self) -> np.ndarray:
        """Rows that each rank would receive in a ring or an all-gather, int64 ``[cp]``."""
        return self.seq_len - self.tokens

    @property
    def padding(self) -> float:
        """Part of all local rows that holds no token."""
        return 1.0 - self.seq_len / (self.cp_size * self.local_len)

    @property
    def collective_rows(self) -> int:
        """Rows of the operands of the portable collectives, on each rank, padding included."""
        return int(self.pair_rows.sum()) * self.cp_size

    def recv_bytes(
        self,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: Any = "bfloat16",
    ) -> np.ndarray:
        """Bytes of keys and values that each rank receives in one forward pass, int64 ``[cp]``.

        Args:
            num_kv_heads: heads of k and v.
            head_dim: head dim of k.
            v_head_dim: head dim of v; None takes ``head_dim``.
            dtype: of k and v.
        """
        return self.recv_rows * _row_bytes(num_kv_heads, head_dim, v_head_dim, dtype)

    def collective_bytes(
        self,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: Any = "bfloat16",
    ) -> int:
        """Bytes that the portable collectives take on each rank in one forward pass, padding
        included.

        Arguments as in `recv_bytes`.
        """
        return self.collective_rows * _row_bytes(num_kv_heads, head_dim, v_head_dim, dtype)

    def __str__(self) -> str:
        ring = max(int(self.ring_rows.max()), 1)
        area = self.area.sum(axis=0)
        lines = [
            ("tokens", f"{self.seq_len:,} on {self.cp_size} ranks, {_span(self.tokens)} each"),
            ("area", f"{area.sum():,} pairs, {_span(area)} each"),
            ("imbalance", f"{self.imbalance:.4f} (busiest rank over mean)"),
            ("remote stages", str(self.stages)),
            ("rows received", f"{_span(self.recv_rows)} per rank, {self.recv_rows.sum():,} in all"),
            ("rows sent", f"{_span(self.send_rows)} per rank"),
            (
                "ring, all-gather",
                f"{_span(self.ring_rows)} rows per rank, {self.ring_rows.sum():,} in all",
            ),
            ("worst rank", f"{self.recv_rows.max() / ring:.1%} of what a ring would bring it"),
            ("redundancy", f"{self.redundancy:.3f}"),
            ("padded collective", f"{self.collective_rows:,} rows per rank"),
            ("padding", f"{self.padding:.2%} of local rows"),
            (
                "predicted",
                f"{self.forward.predicted_us:,.0f} us forward, {self.backward.predicted_us:,.0f} us"
                f" backward, efficiency {self.efficiency:.2f}",
            ),
            ("planning", "-" if self.planning_ms is None else f"{self.planning_ms:.1f} ms"),
        ]
        if self.bounds is not None:
            text = f"{self.bounds.rank_rows:,} rows for the worst rank, imbalance {self.bounds.imbalance:.4f}"
            lines.insert(-1, ("lower bounds", f"{text}; gap in rows {self.gap:.1%}"))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def make_report(
    plan,
    cost_model: CostModel | None = None,
    ranks_per_node: int | None = None,
    mask: AttnMask | None = None,
) -> PlanReport:
    """Counts what a plan costs.

    Args:
        plan: one whole plan with values.
        cost_model: rates of the machine, for the predicted times; None takes the defaults.
        ranks_per_node: ranks that share a fast link; None takes all ranks for one node.
        mask: the mask that was planned, for the lower bounds.

    Raises:
        ValueError: the plan is traced, stacked or local, so that there are no tables to count.
    """
    require_concrete(plan, "report")
    cp_size = plan.cp_size
    area = [
        bands.area(table.slices.reshape(-1, bands.NUM_COLUMNS)).reshape(cp_size, -1).sum(axis=1)
        for table in jax.tree.map(np.asarray, plan.calc)
    ]
    traffic = [_traffic(meta, cp_size) for meta in plan.comm]
    received = sum(int(rows.sum()) for rows in traffic)
    rows = np.reshape(traffic, (len(traffic), cp_size, cp_size)).astype(np.int64)
    work = _stage_work(plan, rows, cost_model or CostModel(), ranks_per_node)
    report = PlanReport(
        seq_len=plan.spec.seq_len,
        local_len=plan.spec.local_len,
        tokens=np.asarray(plan.dispatch.segments, np.int64)[:, :, SEGMENT_ROWS].sum(axis=1),
        area=np.stack(area),
        traffic=rows,
        buffer_rows=np.array([meta.dst_rows for meta in plan.comm], np.int64),
        pair_rows=np.array([meta.pair_rows for meta in plan.comm], np.int64),
        redundancy=received / max(_distinct_rows(plan), 1) if received else 1.0,
        planning_ms=plan.planning_ms,
        forward=timeline.simulate(work),
        backward=timeline.simulate(work, backward=True),
        kernel_us=float((work.forward_us + work.backward_us).sum(axis=0).mean()),
    )
    if mask is None:
        return report
    return replace(report, bounds=_bounds(plan, mask, report.imbalance, ranks_per_node))


def _bounds(plan, mask: AttnMask, imbalance: float, ranks_per_node: int | None) -> Bounds:
    """Lower bounds for all dispatches that are no less balanced than the plan.

    The units are the smallest parts into which a strategy may split a chunk, so that the bounds hold
    for split and for whole chunks.
    """
    part = plan.spec.chunk_size // math.gcd(plan.spec.chunk_size, MAX_PARTS)
    edges = chunk_edges(plan.spec.seq_len, part)
    units = make_units(DispatchProblem(mask.slices, edges, plan.cp_size))
    units = units._replace(slot=plan.spec.local_len, slots=1)
    return lower_bounds(units, plan.cp_size, ranks_per_node or plan.cp_size, imbalance)


def _stage_work(plan, traffic, cost_model, ranks_per_node) -> timeline.StageWork:
    """Kernel and transfer times of every stage, read off the plan's tables."""
    work = []
    for table in jax.tree.map(np.asarray, plan.calc):
        rank, entry = np.nonzero(
            bands.is_visible(table.slices.reshape(-1, 6)).reshape(plan.cp_size, -1)
        )
        work.append(StageSlices(table.slices[rank, entry].astype(np.int64), rank))
    per_node = plan.cp_size if ranks_per_node is None else ranks_per_node
    return timeline.stage_work(work, traffic, plan.spec.local_len, per_node, cost_model)


def require_concrete(plan, name: str) -> None:
    """Raises ValueError unless the plan is one whole plan with values."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(plan)):
        raise ValueError(
            f"{name}() reads the values of a plan, a traced plan has none: call it outside jit"
        )
    shape = np.shape(plan.positions)
    if shape != (plan.cp_size, plan.spec.local_len):
        raise ValueError(
            f"{name}() wants one whole plan with positions [{plan.cp_size}, {plan.spec.local_len}],"
            f" got {list(shape)}: a stacked or local plan is something else"
        )


def _traffic(meta: CommMeta, cp_size: int) -> np.ndarray:
    """Rows from each source to each destination, int64 ``[cp, cp]``."""
    send = np.asarray(meta.send, np.int64)
    src, entry = np.nonzero(send[:, :, N_ROWS])
    pieces = send[src, entry]
    pair = src * cp_size + pieces[:, PEER]
    rows = np.bincount(pair, weights=pieces[:, N_ROWS], minlength=cp_size * cp_size)
    return rows.reshape(cp_size, cp_size).astype(np.int64)


def _distinct_rows(plan) -> int:
    """Distinct (destination, source, row) triples over all stages."""
    tables = [np.asarray(meta.recv, np.int64) for meta in plan.comm]
    recv = np.concatenate(tables, axis=1)
    dst, entry = np.nonzero(recv[:, :, N_ROWS])
    pieces = recv[dst, entry]
    group = dst * plan.cp_size + pieces[:, PEER]
    begin = pieces[:, SRC_ROW]
    _, begin, end = intervals.union(group, begin, begin + pieces[:, N_ROWS])
    return int((end - begin).sum())


def _row_bytes(num_kv_heads: int, head_dim: int, v_head_dim: int | None, dtype: Any) -> int:
    """Bytes of one row of k and v together."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return num_kv_heads * (head_dim + v_head_dim) * jnp.dtype(dtype).itemsize


def _span(values: np.ndarray) -> str:
    """Least and greatest value."""
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
