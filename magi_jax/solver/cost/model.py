"""How long kernels and transfers take: rates by slice shape and by link, as data.

The default rates are fitted to calls of ranks that were timed on one H200 in bfloat16 at head dim 128
(``benchmarks/planner_rates.py``): within 3 % in the median, 15 % at the 95th percentile. Casts and reduces
of the native transport took 45 microseconds and their bytes at 311 GB/s between two H200; 50 GB/s per GPU
between nodes are assumed. Other tables are loaded with `CostModel.from_json`.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from magi_jax.masks import bands

# (visible keys per query row of a slice, TFLOP/s); between the points rates follow the logarithm.
FORWARD_TFLOPS = (
    (64, 273.0), (256, 433.0), (1024, 660.0), (4096, 662.0), (16384, 664.0),
)  # fmt: skip
BACKWARD_TFLOPS = (
    (64, 213.0), (256, 308.0), (1024, 528.0), (4096, 544.0), (16384, 546.0),
)  # fmt: skip
FLOPS_PER_PAIR = 4  # of a (query, key) pair, per head and head dim: q.k and p.v
BACKWARD_FLOPS_RATIO = 2.5
# Rows of the tiles that the forward kernel merges, or leaves where it sees no key in them.
MERGE_TILE = 16
ADD_GBPS = 4460.0  # at which XLA reads, adds and writes, measured on one H200
# Times that may be 0.
FREE = ("latency_us", "launch_us", "backward_launch_us")


@dataclass(frozen=True)
class CostModel:
    """Rates of one machine for one attention layer.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the layer on one GPU.
        dtype_bytes: bytes of a key or value element in forward and backward casts.
        grad_bytes: bytes of an element of dK and dV on their way to the owner.
        forward_tflops, backward_tflops: kernel rate by visible keys per query row, rising in keys.
        link_gbps: GB/s that a GPU receives (and sends) inside a node.
        node_link_gbps: GB/s that a GPU receives (and sends) across nodes.
        memory_gbps: GB/s at which the partial output of a forward stage is merged, read and written: in
            effect, since much of it passes beside the products of other tiles.
        latency_us: fixed time of a cast or a reduce.
        launch_us, backward_launch_us: what a further stage of a direction costs beside its work.
    """

    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype_bytes: int = 2
    grad_bytes: int = 4
    forward_tflops: tuple[tuple[float, float], ...] = FORWARD_TFLOPS
    backward_tflops: tuple[tuple[float, float], ...] = BACKWARD_TFLOPS
    link_gbps: float = 311.0
    node_link_gbps: float = 50.0
    memory_gbps: float = 9200.0
    latency_us: float = 45.0
    launch_us: float = 70.0
    backward_launch_us: float = 140.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                table = np.asarray(value, float)
                if table.ndim != 2 or table.shape[1] != 2 or (np.diff(table[:, 0]) <= 0).any():
                    raise ValueError(
                        f"{field.name} must list (keys, TFLOP/s) with rising keys, got {value}"
                    )
            elif value < 0 or (value == 0 and field.name not in FREE):
                raise ValueError(f"{field.name} must be positive, got {value}")

    @classmethod
    def from_json(cls, path: str | Path) -> "CostModel":
        """Reads a model from a JSON object of the attributes' names; those left out keep their default.

        Raises:
            ValueError: a name is unknown or a table is malformed.
        """
        values = json.loads(Path(path).read_text())
        unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"{path}: unknown entries {sorted(unknown)}")
        for name in ("forward_tflops", "backward_tflops"):
            if name in values:
                values[name] = tuple(tuple(point) for point in values[name])
        return cls(**values)

    def kernel_us(self, slices: np.ndarray, backward: bool = False) -> np.ndarray:
        """Time of each slice as part of a large launch.

        Args:
            slices: tight slices ``[A, 6]``.
            backward: of the backward pass.

        Returns:
            microseconds ``[A]``.
        """
        return self.times_us(*self.shapes(slices), backward)

    def shapes(
        self, slices: np.ndarray, area: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Area of each slice and the logarithm of its visible keys per row: what rates depend on.

        Args:
            slices: tight slices ``[A, 6]``.
            area: of the slices, where it is known.
        """
        if area is None:
            area = bands.area(slices)
        rows = np.maximum(slices[:, bands.Q_END] - slices[:, bands.Q_START], 1)
        return area, np.log(np.maximum(area / rows, 1.0))

    def times_us(self, area: np.ndarray, log_keys: np.ndarray, backward: bool) -> np.ndarray:
        """`kernel_us` of slices whose `shapes` are known."""
        at, rates = self._rate_points(backward)
        return area * self._us_per_cell(backward) / np.interp(log_keys, at, rates)

    def _rate_points(self, backward: bool) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of keys per row, and the TFLOP/s there."""
        table = np.asarray(self.backward_tflops if backward else self.forward_tflops, float)
        return np.log(table[:, 0]), table[:, 1]

    def _us_per_cell(self, backward: bool) -> float:
        """Time of a (query, key) pair at 1 TFLOP/s."""
        flops = FLOPS_PER_PAIR * (BACKWARD_FLOPS_RATIO if backward else 1.0)
        return flops * self.num_heads * self.head_dim / 1e6

    def rates(self, backward: bool) -> tuple:
        """All that the times of one direction's stages depend on, as the compiled planner takes it; see
        ``xla_ffi/solver/bind_stages.cc``.
        """
        return (
            *self._rate_points(backward),
            self._us_per_cell(backward),
            float(self.kv_row_bytes(self.dtype_bytes)),
            float(self.kv_row_bytes(self.grad_bytes)) if backward else 0.0,
            self.link_gbps,
            self.node_link_gbps,
            self.latency_us,
            self._launch_us(backward),
            self._merge_us_per_row(backward),
        )

    def merge_us(self, rows, backward: bool):
        """Time that a further stage costs: its launches, and forward the float32 output of ``rows`` whose
        queries see keys in it read and written. Backward, each call adds to the dQ of the one before it as it
        goes; but its dK and dV come back as an array of all own rows, which is read once more at the end
        (``rows`` of queries stand for these).
        """
        return self._launch_us(backward) + rows * self._merge_us_per_row(backward)

    def convert_us(self, rows: int) -> float:
        """Time in which ``rows`` of the output of several forward stages, float32, take the dtype of q."""
        per_row = (4 + self.dtype_bytes) * self.num_heads * self.head_dim
        return rows * per_row / (ADD_GBPS * 1e3)

    def _launch_us(self, backward: bool) -> float:
        return self.backward_launch_us if backward else self.launch_us

    def _merge_us_per_row(self, backward: bool) -> float:
        if backward:
            return self.kv_row_bytes(self.grad_bytes) / (ADD_GBPS * 1e3)
        return 2 * 4 * self.num_heads * self.head_dim / (self.memory_gbps * 1e3)

    def cast_us(self, near_rows: np.ndarray, far_rows: np.ndarray) -> np.ndarray:
        """Time for key and value rows: ``near_rows`` inside the node beside ``far_rows`` across nodes."""
        return self.move_us(near_rows, far_rows, self.kv_row_bytes(self.dtype_bytes))

    def reduce_us(self, near_rows: np.ndarray, far_rows: np.ndarray) -> np.ndarray:
        """Time for the same rows of dK and dV on their way back."""
        return self.move_us(near_rows, far_rows, self.kv_row_bytes(self.grad_bytes))

    def kv_row_bytes(self, element_bytes: int) -> int:
        """Bytes of a row of keys and values, or of their gradients."""
        return 2 * self.num_kv_heads * self.head_dim * element_bytes

    def travel_bytes(self, backward: bool) -> tuple[int, int]:
        """Bytes that a travelling query row takes on its way out, and back to its owner.

        Forward: q out; out and lse, in float32, back. Backward: q, dout, lse and delta out; dq back.
        """
        row = self.num_heads * self.head_dim
        if backward:
            return 2 * row * self.dtype_bytes + 8 * self.num_heads, 4 * row
        return row * self.dtype_bytes, 4 * row + 4 * self.num_heads

    def move_us(self, near_rows, far_rows, row_bytes: int) -> np.ndarray:
        """Time for rows of ``row_bytes``: the slower of the links inside the node and across nodes."""
        near_us = near_rows * row_bytes / (self.link_gbps * 1e3)
        far_us = far_rows * row_bytes / (self.node_link_gbps * 1e3)
        busy = (near_rows > 0) | (far_rows > 0)
        return np.maximum(near_us, far_us) + self.latency_us * busy
