"""Plans: the solvers' results as pytrees of int32 tables with static sizes."""

from magi_jax.plan.attention_plan import AttentionPlan
from magi_jax.plan.build import make_plan
from magi_jax.plan.comm_spec import AnyCommSpec, CommSpec, TwoLevelSpec
from magi_jax.plan.config import PlanConfig
from magi_jax.plan.part_specs import StagesSpec, TableSpec, TravelSpec
from magi_jax.plan.report import PlanReport
from magi_jax.plan.sizes import bucket
from magi_jax.plan.slice_table import slice_table
from magi_jax.plan.spec import PlanSpec
from magi_jax.plan.stack import stack_plans
from magi_jax.plan.tables import (
    AnyComm,
    CommMeta,
    DispatchMeta,
    LateTables,
    SharedTables,
    SliceTable,
    StageTables,
    TravelTables,
    TwoLevelComm,
    local_part,
)
from magi_jax.solver.slice_table import TILE_SIZE, TileRuns

__all__ = [
    "TILE_SIZE",
    "AnyComm",
    "AnyCommSpec",
    "AttentionPlan",
    "CommMeta",
    "CommSpec",
    "DispatchMeta",
    "LateTables",
    "PlanConfig",
    "PlanReport",
    "PlanSpec",
    "SharedTables",
    "SliceTable",
    "StageTables",
    "StagesSpec",
    "TableSpec",
    "TileRuns",
    "TravelSpec",
    "TravelTables",
    "TwoLevelComm",
    "TwoLevelSpec",
    "bucket",
    "local_part",
    "make_plan",
    "slice_table",
    "stack_plans",
]
