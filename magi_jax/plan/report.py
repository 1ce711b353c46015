"""What a plan costs: balance, rows and bytes that cross ranks, padding, predicted times."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from magi_jax.solver.cost.timeline import Timeline
from magi_jax.solver.dispatch.bounds import Bounds, gap


@dataclass(frozen=True, eq=False, repr=False)
class PlanReport:
    """Counts of one plan, shown as a table.

    Attributes:
        seq_len: tokens of the sequence.
        local_len: rows of each rank, padding included.
        tokens: ``[cp]`` tokens of each rank.
        area: ``[1 + stages, cp]`` (query, key) pairs that each rank computes in each stage of the
            forward pass, without those of queries that travelled to it. Late queries are one more stage.
        traffic: ``[stages, cp, cp]`` key rows from source (first axis) to destination.
        ranks_per_node: ranks of a node.
        two_level: whether rows cross to a node once and are passed on inside it.
        link_traffic: ``[stages, cp, cp]`` key rows that move over the link between two ranks; in two steps
            to relays and from them, else ``traffic``.
        backward_stages: remote stages of the backward pass.
        travel_area: ``[cp]`` pairs that each rank computes for queries that travelled to it.
        travel_traffic: ``[cp, cp]`` query rows that travel from source to destination; as many partial
            results return.
        buffer_rows: ``[stages]`` rows of each received buffer, padding included.
        wire_rows: ``[stages]`` rows of the operands of the portable collectives on each rank, padding
            included.
        redundancy: received rows over distinct ones; 1.0 always.
        planning_ms: time that planning took on the host; None when the plan was transformed since.
        forward, backward: predicted timelines of the stages.
        forward_kernel_us, backward_kernel_us: mean kernel time of a rank.
        bounds: what no dispatch can beat at this imbalance; None when the report was
            made without the mask.
        is_cross: whether keys are other tokens than queries, for which nothing here says what a ring
            would bring.
    """

    seq_len: int
    local_len: int
    tokens: np.ndarray
    area: np.ndarray
    traffic: np.ndarray
    ranks_per_node: int
    two_level: bool
    link_traffic: np.ndarray
    backward_stages: int
    travel_area: np.ndarray
    travel_traffic: np.ndarray
    buffer_rows: np.ndarray
    wire_rows: np.ndarray
    redundancy: float
    planning_ms: float | None
    forward: Timeline
    backward: Timeline
    forward_kernel_us: float
    backward_kernel_us: float
    bounds: Bounds | None = None
    is_cross: bool = False

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return len(self.tokens)

    @property
    def stages(self) -> int:
        """Number of remote stages of the forward pass."""
        return len(self.traffic)

    @property
    def imbalance(self) -> float:
        """Area of the busiest rank over the mean; 1.0 for an empty mask."""
        area = self.rank_area
        return float(area.max() / area.mean()) if area.any() else 1.0

    @property
    def rank_area(self) -> np.ndarray:
        """Pairs that each rank computes, int64 ``[cp]``."""
        return self.area.sum(axis=0) + self.travel_area

    @property
    def recv_rows(self) -> np.ndarray:
        """Key rows that each rank receives in the forward pass, int64 ``[cp]``."""
        return self.traffic.sum(axis=(0, 1))

    @property
    def send_rows(self) -> np.ndarray:
        """Key rows that each rank sends in the forward pass, int64 ``[cp]``."""
        return self.traffic.sum(axis=(0, 2))

    @property
    def crossing_rows(self) -> np.ndarray:
        """Key rows that enter each rank from other nodes in the forward pass, int64 ``[cp]``."""
        node = np.arange(self.cp_size) // self.ranks_per_node
        return (self.link_traffic * (node[:, None] != node)).sum(axis=(0, 1))

    @property
    def predicted_us(self) -> float:
        """Predicted time of forward and backward attention on the slowest rank."""
        return self.forward.predicted_us + self.backward.predicted_us

    @property
    def efficiency(self) -> float:
        """Mean kernel time over the predicted time, both directions; 1.0 when there is nothing to do."""
        kernel_us = self.forward_kernel_us + self.backward_kernel_us
        return kernel_us / self.predicted_us if self.predicted_us > 0 else 1.0

    @property
    def forward_efficiency(self) -> float:
        """The same of the forward pass."""
        return self.forward.efficiency(self.forward_kernel_us)

    @property
    def backward_efficiency(self) -> float:
        """The same of the backward pass."""
        return self.backward.efficiency(self.backward_kernel_us)

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
        """Rows that each rank would receive in a ring or an all-gather of self-attention, int64 ``[cp]``."""
        return self.seq_len - self.tokens

    @property
    def padding(self) -> float:
        """Part of all local rows that holds no token."""
        return 1.0 - self.seq_len / (self.cp_size * self.local_len)

    @property
    def collective_rows(self) -> int:
        """Rows of the operands of the portable collectives, on each rank, padding included."""
        return int(self.wire_rows.sum())

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

    def _beside_a_ring(self) -> tuple[tuple[str, str], ...]:
        ring = self.ring_rows
        share = self.recv_rows.max() / max(int(ring.max()), 1)
        return (
            ("ring, all-gather", f"{_span(ring)} rows per rank, {ring.sum():,} in all"),
            ("worst rank", f"{share:.1%} of what a ring would bring it"),
        )

    def _across_nodes(self) -> tuple[tuple[str, str], ...]:
        if self.ranks_per_node >= self.cp_size:
            return ()
        rows = self.crossing_rows
        way = "once per node, then inside" if self.two_level else "once per rank that needs them"
        text = f"{_span(rows)} rows into each rank, {rows.sum():,} in all, {way}"
        return (("between nodes", text),)

    def __repr__(self) -> str:
        area = self.rank_area
        lines = [
            ("tokens", f"{self.seq_len:,} on {self.cp_size} ranks, {_span(self.tokens)} each"),
            ("area", f"{area.sum():,} pairs, {_span(area)} each"),
            ("imbalance", f"{self.imbalance:.4f} (busiest rank over mean)"),
            ("remote stages", f"{self.stages} forward, {self.backward_stages} backward"),
            ("rows received", f"{_span(self.recv_rows)} per rank, {self.recv_rows.sum():,} in all"),
            ("rows sent", f"{_span(self.send_rows)} per rank"),
            *self._across_nodes(),
            *(() if self.is_cross else self._beside_a_ring()),
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
        if self.travel_traffic.any():
            received = self.travel_traffic.sum(axis=0)
            text = f"{_span(received)} query rows to each rank, {self.travel_area.sum():,} pairs"
            lines.insert(-1, ("travelling", text))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _row_bytes(num_kv_heads: int, head_dim: int, v_head_dim: int | None, dtype: Any) -> int:
    """Bytes of one row of k and v together."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return num_kv_heads * (head_dim + v_head_dim) * jnp.dtype(dtype).itemsize


def _span(values: np.ndarray) -> str:
    """Least and greatest value."""
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
