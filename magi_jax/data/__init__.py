"""From documents to batches: packing, and planning ahead of the training loop."""

from magi_jax.data.packing import NO_LABEL, Packed, assign, batch, join, pack
from magi_jax.data.planned_batch import PlannedBatch
from magi_jax.data.planning import PlanBatch
from magi_jax.data.prefetch import Prefetch
from magi_jax.data.processes import check_same_plans, place

__all__ = [
    "NO_LABEL",
    "Packed",
    "PlanBatch",
    "PlannedBatch",
    "Prefetch",
    "assign",
    "batch",
    "check_same_plans",
    "join",
    "pack",
    "place",
]
