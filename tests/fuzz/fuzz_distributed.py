"""One fuzz case of planner and `dist_attention`: a setup fixes what is compiled, a seed the rest."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from magi_jax import (
    AttentionPlan,
    DistOptions,
    PlanConfig,
    dispatch,
    dist_attention,
    make_plan,
    undispatch,
)
from magi_jax.plan import PlanSpec
from magi_jax.testing.hostile_masks import HostileMask, hostile_mask
from magi_jax.testing.hostile_values import (
    Answer,
    HostileValues,
    Operands,
    check_answer,
    hostile_values,
)

# Masks that a program is sized for before the first case.
SAMPLE = 24


@dataclasses.dataclass(frozen=True)
class Setup:
    """What cases share, so that they share a program. ``heads`` is ``(N, K, H, Hv)``."""

    cp_size: int
    seq_len: int
    chunk_size: int
    dispatch: str
    stages: int
    heads: tuple[int, int, int, int] = (4, 2, 8, 6)
    dtype: str = "float32"
    cap: float | None = None
    num_sinks: int = 0
    ranks_per_node: int | None = None
    options: DistOptions = dataclasses.field(default_factory=DistOptions)

    @property
    def config(self) -> PlanConfig:
        """How its masks are planned."""
        return PlanConfig(
            seq_len=self.seq_len,
            chunk_size=self.chunk_size,
            dispatch=self.dispatch,
            overlap=self.stages,
            ranks_per_node=self.ranks_per_node,
            roll_shifts=(),
        )


SETUPS = {
    "cp8_balanced": Setup(8, 181, 3, "balanced", 2, cap=3.0, num_sinks=1),
    "cp4_nodes": Setup(4, 149, 7, "balanced", 3, ranks_per_node=2, dtype="bfloat16"),
    "cp1": Setup(1, 97, 97, "contiguous", 1, num_sinks=2),
    "cp2_zigzag": Setup(2, 139, 5, "zigzag", 1, (2, 2, 4, 4), options=DistOptions(True)),
    "cp8_lpt": Setup(8, 127, 16, "lpt", 4, (6, 1, 4, 8)),
    "cp3_contiguous": Setup(3, 101, 1, "contiguous", 2),
    "cp8_more_ranks_than_chunks": Setup(8, 29, 8, "balanced", 1),
}


class Distributed:
    """Runs cases of one setup on virtual devices; the plan's sizes grow when a mask needs it."""

    def __init__(self, name: str):
        self.name, self.setup = name, SETUPS[name]
        cp_size = self.setup.cp_size
        self.mesh = jax.make_mesh(
            (cp_size,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:cp_size]
        )
        self.spec = _sample_spec(self.setup)
        self.compute = jax.jit(functools.partial(_compute, self.setup, self.mesh))

    def draw(self, seed: int) -> tuple[HostileMask, HostileValues, np.ndarray | None]:
        """Mask, values and sinks of a seed; the mask may be shorter than the sequence."""
        setup = self.setup
        rng = np.random.default_rng([seed, *self.name.encode()])
        mask = _mask(rng, setup.seq_len)
        values = hostile_values(rng, mask.dense, setup.heads, jnp.dtype(setup.dtype))
        sinks = None
        if setup.num_sinks:
            sinks = rng.normal(size=(setup.num_sinks, setup.heads[0])).astype(np.float32)
        return mask, values, sinks

    def run(self, seed: int) -> tuple[str, str]:
        """Runs a case; returns its family and kind.

        Raises:
            AssertionError: the answer is wrong; it says where.
        """
        hostile, values, sinks = self.draw(seed)
        plan = self._plan(hostile)
        operands = Operands(**dispatch(values.operands._asdict(), plan))
        answer = self.compute(operands, sinks, plan)
        rows = {n: np.asarray(x, np.float32) for n, x in answer._asdict().items() if n != "dsinks"}
        answer = Answer(**undispatch(rows, plan), dsinks=answer.dsinks)
        try:
            check_answer(
                answer,
                values,
                hostile.dense,
                self.setup.dtype,
                logits_soft_cap=self.setup.cap,
                sinks=sinks,
            )
        except AssertionError as error:
            raise AssertionError(f"{hostile.family}, {values.kind}: {error}") from error
        return hostile.family, values.kind

    def _plan(self, hostile: HostileMask) -> AttentionPlan:
        setup = self.setup
        plan = make_plan(hostile.mask, setup.cp_size, setup.config)
        if not self.spec.covers(plan.spec):
            self.spec = self.spec.union(plan.spec.scaled(2.0))
        return make_plan(hostile.mask, setup.cp_size, setup.config, self.spec)


def _mask(rng: np.random.Generator, seq_len: int) -> HostileMask:
    """A square mask of any length, with what is behind its end as rows that see nothing."""
    length = seq_len if rng.random() < 0.5 else int(rng.integers(1, seq_len + 1))
    hostile = hostile_mask(rng, length, length)
    behind = (0, seq_len - length)
    return dataclasses.replace(hostile, dense=np.pad(hostile.dense, (behind, behind)))


def _sample_spec(setup: Setup) -> PlanSpec:
    rng = np.random.default_rng(0)
    masks = [_mask(rng, setup.seq_len).mask for _ in range(SAMPLE)]
    specs = [make_plan(mask, setup.cp_size, setup.config).spec for mask in masks]
    return functools.reduce(lambda a, b: a.union(b), specs).scaled(2.0)


def _compute(setup: Setup, mesh, operands: Operands, sinks, plan: AttentionPlan) -> Answer:
    q, k, v, dout = (x.astype(setup.dtype) for x in operands[:4])

    def attend(q, k, v, sinks):
        return dist_attention(
            q,
            k,
            v,
            plan,
            mesh=mesh,
            sinks=sinks,
            logits_soft_cap=setup.cap,
            return_lse=True,
            options=setup.options,
        )

    (out, lse), pull_back = jax.vjp(attend, q, k, v, sinks)
    return Answer(out, lse, *pull_back((dout, operands.dlse)))
