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
    masks,
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
    """What cases share, so that they share a program.

    ``heads`` is ``(N, K, H, Hv)``. With ``keys`` it is cross-attention to so many keys, which are in
    a dispatch of their own, or all on every rank.
    """

    cp_size: int
    seq_len: int
    chunk_size: int
    dispatch: str
    stages: int | tuple[int | tuple[bool, ...], int | tuple[bool, ...]] | str
    heads: tuple[int, int, int, int] = (4, 2, 8, 6)
    dtype: str = "float32"
    cap: float | None = None
    num_sinks: int = 0
    ranks_per_node: int | None = None
    two_level: bool | str = "auto"
    travelling: tuple[tuple[int, int], ...] | str = "never"
    keys: int | None = None
    replicated: bool = False
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
            two_level=self.two_level,
            travelling=self.travelling,
            roll_shifts=(),
        )


SETUPS = {
    "cp8_balanced": Setup(8, 181, 3, "balanced", 2, cap=3.0, num_sinks=1),
    "cp4_nodes": Setup(4, 149, 7, "balanced", 3, ranks_per_node=2, dtype="bfloat16"),
    "cp1": Setup(1, 97, 97, "contiguous", 1, num_sinks=2),
    "cp2_zigzag": Setup(
        2, 139, 5, "zigzag", 1, (2, 2, 4, 4), options=DistOptions(deterministic=True)
    ),
    "cp8_lpt": Setup(8, 127, 16, "lpt", 4, (6, 1, 4, 8)),
    "cp3_contiguous": Setup(3, 101, 1, "contiguous", 2),
    "cp8_more_ranks_than_chunks": Setup(8, 29, 8, "balanced", 1),
    "cp4_travelling": Setup(
        4, 131, 4, "balanced", 2, travelling=((20, 29), (90, 131)), num_sinks=1
    ),
    "cp4_other_backward": Setup(4, 113, 4, "lpt", (1, 3), dtype="float16"),
    "cp4_auto": Setup(4, 157, 4, "balanced", "auto", travelling="auto"),
    "cp4_late": Setup(4, 139, 5, "balanced", "late", (2, 1, 8, 8), cap=4.0),
    "cp8_two_level": Setup(
        8, 167, 4, "balanced", 2, (2, 2, 4, 8), "bfloat16", ranks_per_node=2, two_level=True
    ),
    "cp8_two_level_travelling": Setup(
        8,
        151,
        6,
        "lpt",
        ((True, False), (True, False, True)),
        ranks_per_node=4,
        two_level=True,
        travelling=((30, 47),),
        num_sinks=1,
    ),
    "cp4_cross": Setup(4, 109, 4, "balanced", 2, keys=83),
    "cp3_replicated_keys": Setup(3, 71, 8, "zigzag", 1, keys=149, replicated=True),
}


class Distributed:
    """Runs cases of one setup on virtual devices; the plan's sizes grow when a mask needs it."""

    def __init__(self, name: str):
        self.name, self.setup = name, SETUPS[name]
        cp_size = self.setup.cp_size
        self.mesh = jax.make_mesh(
            (cp_size,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:cp_size]
        )
        self.queries = self.keys = None
        if self.setup.keys is not None:
            self.queries = make_plan(masks.causal(self.setup.seq_len), cp_size, self.setup.config)
            if not self.setup.replicated:
                config = dataclasses.replace(self.setup.config, seq_len=self.setup.keys)
                self.keys = make_plan(masks.causal(self.setup.keys), cp_size, config)
        self.spec = self._sample_spec()
        self.compute = jax.jit(functools.partial(_compute, self.setup, self.mesh))

    def draw(self, seed: int) -> tuple[HostileMask, HostileValues, np.ndarray | None]:
        """Mask, values and sinks of a seed; the mask may be shorter than the sequence."""
        setup = self.setup
        rng = np.random.default_rng([seed, *self.name.encode()])
        mask = self._mask(rng)
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
        answer = self.compute(self._dispatched(values.operands, plan), sinks, plan)
        answer = self._undispatched(answer, plan)
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

    def _dispatched(self, operands: Operands, plan: AttentionPlan) -> Operands:
        moved = dispatch(operands._replace(k=(), v=()), plan)
        keys = {"k": operands.k, "v": operands.v}
        if not self.setup.replicated:
            keys = dispatch(keys, self.keys or plan)
        return moved._replace(**keys)

    def _undispatched(self, answer: Answer, plan: AttentionPlan) -> Answer:
        rows = {n: np.asarray(x, np.float32) for n, x in answer._asdict().items() if n != "dsinks"}
        keys = {name: rows.pop(name) for name in ("dk", "dv")}
        if not self.setup.replicated:
            keys = undispatch(keys, self.keys or plan)
        return Answer(**undispatch(rows, plan), **keys, dsinks=answer.dsinks)

    def _make_plan(self, hostile: HostileMask, spec: PlanSpec | None) -> AttentionPlan:
        setup = self.setup
        if self.queries is None:
            return make_plan(hostile.mask, setup.cp_size, setup.config, spec)
        keys = "replicated" if setup.replicated else self.keys
        return self.queries.with_mask(hostile.mask, keys=keys, overlap=setup.stages, spec=spec)

    def _plan(self, hostile: HostileMask) -> AttentionPlan:
        plan = self._make_plan(hostile, None)
        if not self.spec.covers(plan.spec):
            self.spec = self.spec.union(plan.spec.scaled(2.0))
        return self._make_plan(hostile, self.spec)

    def _mask(self, rng: np.random.Generator) -> HostileMask:
        """A mask; a square one may be of any length, what is behind its end sees nothing."""
        size, keys = self.setup.seq_len, self.setup.keys
        if keys is not None:
            return hostile_mask(rng, size, keys)
        length = size if rng.random() < 0.5 else int(rng.integers(1, size + 1))
        hostile = hostile_mask(rng, length, length)
        behind = (0, size - length)
        return dataclasses.replace(hostile, dense=np.pad(hostile.dense, (behind, behind)))

    def _sample_spec(self) -> PlanSpec:
        rng = np.random.default_rng(0)
        specs = [self._make_plan(self._mask(rng), None).spec for _ in range(SAMPLE)]
        return specs[0].union(*specs[1:]).scaled(2.0)


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
            return_residual=True,
            options=setup.options,
        )

    (out, lse), pull_back = jax.vjp(attend, q, k, v, sinks)
    return Answer(out, lse, *pull_back((dout, operands.dlse)))
