"""`AttentionPlan`: the solvers' results as one pytree."""

import dataclasses
import functools
import hashlib
import time
from dataclasses import dataclass
from os import PathLike

import jax
import numpy as np

from magi_jax.masks.attn_mask import AttnMask, require_mask
from magi_jax.plan.config import settled_overlap, settled_travelling
from magi_jax.plan.frame import Frame, frame_of, require_frame
from magi_jax.plan.keys import Tokens, find_keys
from magi_jax.plan.lay_out.dispatch import lay_out_dispatch, layout_of
from magi_jax.plan.lay_out.ways import Overlap
from magi_jax.plan.lay_out.work import WorkTables, lay_out_work, spec_of
from magi_jax.plan.measure import make_report, require_concrete
from magi_jax.plan.padding import pad_plan_tables
from magi_jax.plan.plot import plot_plan
from magi_jax.plan.report import PlanReport
from magi_jax.plan.solve import Travelling, machine_of, settle_work, travelling_ranges
from magi_jax.plan.spec import OWN_KEYS, REPLICATED_KEYS, PlanSpec
from magi_jax.plan.tables import (
    AnyComm,
    Array,
    CommMeta,
    DispatchMeta,
    LateTables,
    SliceTable,
    StageTables,
    TravelTables,
    local_part,
)
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.cost.model import CostModel
from magi_jax.solver.engine import check_engine
from magi_jax.solver.work.join import join_diagonals


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("dispatch", "calc", "comm", "rolls", "backward", "travel", "late"),
    meta_fields=("spec",),
    drop_fields=("planning_ms",),
)
@dataclass(frozen=True, eq=False, repr=False)
class AttentionPlan:
    """Who holds which tokens, what crosses ranks, and what each rank computes in each stage.

    Every leaf is int32 with a leading ``[cp]`` axis, so ``P("cp")`` shards all of them; the plan is
    a value that may be closed over or passed to a jitted step next to the batch.

    Attributes:
        dispatch: where tokens live.
        calc: slice table of each stage; stage 0 reads local keys, stage ``i + 1`` what ``comm[i]``
            brought.
        comm: rows that stage ``i + 1`` receives, in one step or in two.
        rolls: transfer of each of ``spec.roll_shifts``.
        spec: static sizes.
        backward: stages of the backward pass; None where it shares ``calc`` and ``comm``.
        travel: queries that go to the owners of their keys; None where none travel.
        late: queries that the forward pass computes last and at once; None where there are none.
        planning_ms: time that planning took, for reports; not part of the tree, so None after any
            transformation of it.
    """

    dispatch: DispatchMeta
    calc: tuple[SliceTable, ...]
    comm: tuple[AnyComm, ...]
    rolls: tuple[CommMeta, ...]
    spec: PlanSpec
    backward: StageTables | None = None
    travel: TravelTables | None = None
    late: LateTables | None = None
    planning_ms: float | None = dataclasses.field(default=None, compare=False)

    def __repr__(self) -> str:
        # Not the tables, which would fill the screen, nor anything of theirs: they may be traced or None.
        sizes, stages = self.spec, self.spec.num_remote_stages
        return (
            f"AttentionPlan(cp_size={sizes.cp_size}, seq_len={sizes.seq_len}, local_len={sizes.local_len},"
            f" chunk_size={sizes.chunk_size}, num_remote_stages={stages})"
        )

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return self.spec.cp_size

    @property
    def forward_stages(self) -> StageTables:
        """What the stages of the forward pass read."""
        return StageTables(self.calc, self.comm, self.late)

    @property
    def backward_stages(self) -> StageTables:
        """What the stages of the backward pass read."""
        return self.forward_stages if self.backward is None else self.backward

    @property
    def positions(self) -> Array:
        """Global position of each local row, int32 ``[cp, local_len]``, -1 = padding."""
        return self.dispatch.positions

    def local(self, rank: Array) -> "AttentionPlan":
        """The part of one rank, without leading axes, whether the leaves arrive sharded or whole.

        Args:
            rank: index along the cp axis, usually ``jax.lax.axis_index``.
        """
        return local_part(self, rank, self.cp_size, lead=self.positions.ndim - 1)

    def report(
        self,
        cost_model: CostModel | None = None,
        ranks_per_node: int | None = None,
        mask: AttnMask | None = None,
    ) -> PlanReport:
        """Balance, rows, bytes and predicted times of this plan; printing it gives a table.

        Args:
            cost_model: rates of the machine; None takes the defaults.
            ranks_per_node: ranks that share a fast link; None takes the nodes that rows of this plan
                cross once, or all ranks for one node.
            mask: the mask that was planned; with it the report has lower bounds and the gap to them.

        Raises:
            ValueError: the plan is traced, stacked or local, or ``mask`` is not the one that was planned.
        """
        return make_report(self, cost_model, ranks_per_node, mask)

    def plot(self, path: str | PathLike, report: PlanReport | None = None) -> None:
        """Draws the mask coloured by owner, the area of each rank, the traffic between ranks and timelines.

        Args:
            path: file to write; its suffix chooses the format.
            report: of this plan, where other rates than the default ones shall predict its timelines.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the plan is traced, stacked or local, or its keys are other tokens.
        """
        require_concrete(self, "plot")
        if self.spec.keys != OWN_KEYS:
            raise ValueError("plot() draws self-attention; the keys of this plan are other tokens")
        plot_plan(jax.tree.map(np.asarray, self), path, report)

    def fingerprint(self) -> str:
        """A hash of all tables and sizes, 32 hex digits: equal on processes that planned the same.

        Raises:
            ValueError: the plan is traced.
        """
        digest = hashlib.sha256(repr(self.spec).encode())
        for leaf in jax.tree.leaves(self):
            if isinstance(leaf, jax.core.Tracer):
                raise ValueError("fingerprint() reads the values of a plan, a traced plan has none")
            leaf = np.ascontiguousarray(leaf, "<i4")
            digest.update(repr(leaf.shape).encode())
            digest.update(leaf.tobytes())
        return digest.hexdigest()[:32]

    def with_mask(
        self,
        mask: AttnMask,
        *,
        keys: "AttentionPlan | str | None" = None,
        overlap: Overlap = "auto",
        travelling: Travelling = "auto",
        spec: PlanSpec | None = None,
        machine: Machine | None = None,
        engine: str = "compiled",
    ) -> "AttentionPlan":
        """Plans another mask on the same dispatch, so that layers with both share one layout of
        tokens; or cross-attention of these tokens to others.

        Args:
            mask: a square mask, at most ``spec.seq_len`` long; with ``keys`` a mask of these queries
                and those keys.
            keys: where the keys of cross-attention are: the plan that dispatched them (such as that
                of an encoder), or "replicated" for all ``mask.k_len`` of them on every rank, which
                needs no communication. None for the tokens of this plan.
            overlap: number of remote stages, as in `PlanConfig`.
            travelling: which queries travel, as in `PlanConfig`; none to replicated keys.
            spec: sizes to lay the plan out in; None takes this plan's for the dispatch and the
                mask's own for the stages.
            machine: what to predict times for; None takes the defaults, and the nodes of this plan where
                its rows take two steps.
            engine: "compiled" or "numpy"; both make the same plans.

        Raises:
            TypeError: ``mask`` is no mask, or ``keys`` are neither a plan nor a name.
            ValueError: the mask does not fit the sequence, or the plan does not fit ``spec``.
        """
        started = time.perf_counter()
        own = self._tokens("with_mask")
        require_mask(mask)
        check_engine(engine)
        overlap, travelling = settled_overlap(overlap), settled_travelling(travelling)
        frame = frame_of(self.spec)
        others = keys._tokens("with_mask") if isinstance(keys, AttentionPlan) else keys
        kind, home, keys_len = find_keys(mask, own, others)
        layout = layout_of(self.dispatch, self.cp_size)
        dispatched, rolls = self.dispatch, self.rolls
        if spec is not None:
            require_frame(spec, frame)
            dispatched, rolls = lay_out_dispatch(layout, frame, spec, engine)
        machine = machine or Machine(self.spec.ranks_per_node)
        machine = machine_of(machine, self.cp_size, spec)
        if kind == REPLICATED_KEYS:
            if travelling not in ("auto", "never"):
                raise ValueError(f"every rank has all keys; nobody need travel, got {travelling=}")
            travelling = "never"
        slices = join_diagonals(mask.slices, engine)
        ranges = travelling_ranges(travelling, slices, frame, machine, spec, keys_len)
        work = settle_work(
            slices, ranges, layout, home, machine, engine, may_stay=travelling == "auto"
        )
        tables = lay_out_work(work, frame, overlap, spec, machine)
        planning_ms = (time.perf_counter() - started) * 1e3
        return assemble(frame, dispatched, rolls, tables, planning_ms, kind)

    def _tokens(self, user: str) -> Tokens:
        """Where the tokens of this plan are, for ``user``, which reads its tables."""
        require_concrete(self, user)
        return Tokens(self.dispatch, self.spec)

    def pad_to(self, spec: PlanSpec) -> "AttentionPlan":
        """The same plan in larger sizes, without solving anything again.

        Stages that only ``spec`` has stay empty.

        Args:
            spec: covers this plan's, as that of `PlanSpec.union` does.

        Raises:
            ValueError: the plan does not fit ``spec``; the first size that is too small is named.
        """
        require_concrete(self, "pad_to")
        tables = WorkTables(self.forward_stages, self.backward, self.travel)
        dispatched, rolls, tables = pad_plan_tables(
            self.spec, spec, self.dispatch, self.rolls, tables
        )
        return assemble(frame_of(spec), dispatched, rolls, tables, self.planning_ms, self.spec.keys)


def assemble(
    frame: Frame,
    dispatched: DispatchMeta,
    rolls: tuple[CommMeta, ...],
    tables: WorkTables,
    planning_ms: float | None,
    keys: str = OWN_KEYS,
) -> AttentionPlan:
    """A plan of finished tables, with the spec that they have."""
    spec = PlanSpec(
        **frame._asdict(),
        segments=dispatched.segments.shape[1],
        transfer=dispatched.transfer.spec,
        rolls=tuple(meta.spec for meta in rolls),
        keys=keys,
        **spec_of(tables),
    )
    forward, backward, travel = tables
    return AttentionPlan(
        dispatched,
        forward.calc,
        forward.comm,
        rolls,
        spec,
        backward,
        travel,
        forward.late,
        planning_ms,
    )
