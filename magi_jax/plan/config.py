"""The knobs of planning."""

from dataclasses import dataclass, field

from magi_jax.solver.balanced import EFFORTS
from magi_jax.solver.cost_model import CostModel
from magi_jax.solver.engine import check_engine
from magi_jax.solver.slice_table import TILE_SIZE
from magi_jax.solver.strategies import STRATEGIES


@dataclass(frozen=True)
class PlanConfig:
    """How a plan is made. Hashable; no knob changes results, only where and when they are computed.

    Attributes:
        seq_len: tokens of the sequence, of which a mask may fill a part; None takes the mask's
            length.
        chunk_size: tokens that move together in the dispatch. None chooses the largest power of two
            that leaves each rank eight chunks, within [128, 1024], and less where ranks would stay
            empty.
        dispatch: name of the strategy that gives chunks to ranks: "balanced", "lpt", "zigzag" or
            "contiguous".
        ranks_per_node: ranks that share a fast link; "balanced" counts rows that enter a node as well.
            None takes all ranks for one node.
        effort: "fast" for planning every batch, "high" for planning ahead in background workers; how
            long "balanced" searches.
        engine: "compiled" or "numpy"; both make the same plans, in milliseconds and in seconds.
        overlap: number of remote stages (at least 1), or "auto": the number from 1 to 4 for which
            ``cost_model`` predicts the least time.
        cost_model: rates of the machine.
        roll_shifts: shifts for which the plan holds a roll transfer.
        tile_size: rows of a tile in the slice tables; the kernels of this package read 128.
    """

    seq_len: int | None = None
    chunk_size: int | None = None
    dispatch: str = "balanced"
    ranks_per_node: int | None = None
    effort: str = "fast"
    engine: str = "compiled"
    overlap: int | str = "auto"
    cost_model: CostModel = field(default_factory=CostModel)
    roll_shifts: tuple[int, ...] = (-1,)
    tile_size: int = TILE_SIZE

    def __post_init__(self):
        for name in ("seq_len", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.dispatch not in STRATEGIES:
            raise ValueError(f"dispatch must be one of {sorted(STRATEGIES)}, got {self.dispatch!r}")
        if self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {sorted(EFFORTS)}, got {self.effort!r}")
        check_engine(self.engine)
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")
        if self.overlap != "auto" and not (isinstance(self.overlap, int) and self.overlap >= 1):
            raise ValueError(
                f'overlap must be "auto" or an integer of at least 1, got {self.overlap!r}'
            )
        if self.tile_size < 1:
            raise ValueError(f"tile_size must be at least 1, got {self.tile_size}")
        object.__setattr__(self, "roll_shifts", tuple(int(s) for s in self.roll_shifts))
        if len(set(self.roll_shifts)) != len(self.roll_shifts):
            raise ValueError(f"roll_shifts names a shift twice: {self.roll_shifts}")
