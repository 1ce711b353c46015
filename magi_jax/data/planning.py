"""From packed sequences to batches that lie as their plans want them: NumPy on the host."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from magi_jax.data.packing import NO_LABEL, Packed
from magi_jax.masks import AttnMask
from magi_jax.parallel import dispatch
from magi_jax.plan import AttentionPlan, PlanConfig, PlanSpec, make_plan, stack_plans


class PlannedBatch(NamedTuple):
    """A batch of R sequences in dispatched order, with what attention needs. A pytree.

    Attributes:
        packed: tokens, segment ids, positions and labels, int32 ``[R, cp * local_len]``; shard it
            with ``P("dp", "cp")``.
        plans: one plan per mask, stacked over the sequences, leaves ``[R, cp, ...]``; shard them in
            the same way.
    """

    packed: Packed
    plans: tuple[AttentionPlan, ...]


@dataclass(frozen=True)
class PlanBatch:
    """Plans every sequence of a batch: a function from `Packed` ``[R, L]`` to `PlannedBatch`.

    It holds no state and can be pickled when its masks can, so it may run in a `Prefetch` thread or
    in the worker processes of a data-loading library (``dataset.map(PlanBatch(...))`` with grain).

    Attributes:
        cp_size: number of ranks that share a sequence.
        masks: each makes a mask of a sequence from its segment ids ``[L]``. The first decides which
            rank gets which tokens; the others use the same dispatch.
        config: the knobs of planning.
        specs: static sizes of the plans, one per mask; batches that share them share a compiled
            program. None takes the sizes that each batch needs. `fit` finds them.
        grow: let a batch that does not fit ``specs`` take larger sizes, which costs a compilation
            of the step, rather than refuse it. Every batch is then planned twice.
    """

    cp_size: int
    masks: tuple[Callable[[np.ndarray], AttnMask], ...]
    config: PlanConfig = field(default_factory=PlanConfig)
    specs: tuple[PlanSpec, ...] | None = None
    grow: bool = False

    def __call__(self, packed: Packed) -> PlannedBatch:
        """Plans one batch and lays its tokens out as the plans want them.

        Raises:
            ValueError: a plan does not fit ``specs``, and may not ``grow``; the size that is too
                small is named.
        """
        specs = self.specs
        if specs is None or self.grow:
            specs = self._specs_of(packed, specs)
        of_rows = [self._plans(row, specs) for row in _rows(packed)]
        plans = tuple(stack_plans(of_mask) for of_mask in zip(*of_rows, strict=True))
        moved = dispatch(packed, plans[0])
        is_token = np.reshape(plans[0].positions, moved.labels.shape) >= 0
        return PlannedBatch(
            moved._replace(labels=np.where(is_token, moved.labels, NO_LABEL)), plans
        )

    def fit(
        self, batches: Iterable[Packed], *, num_batches: int = 16, margin: float = 1.25
    ) -> "PlanBatch":
        """The same with ``specs`` that cover a sample of batches, so that a step compiles once.

        Args:
            batches: batches like those to come.
            num_batches: how many of them to plan.
            margin: every capacity is made so many times what the sample needs.
        """
        specs = self.specs
        for packed in itertools.islice(batches, num_batches):
            specs = self._specs_of(packed, specs)
        if specs is None:
            raise ValueError("fit needs at least one batch, got none")
        return dataclasses.replace(self, specs=tuple(spec.scaled(margin) for spec in specs))

    def _specs_of(self, packed: Packed, specs: tuple[PlanSpec, ...] | None) -> tuple[PlanSpec, ...]:
        """The smallest specs that cover the batch and the given specs."""
        for row in _rows(packed):
            found = tuple(plan.spec for plan in self._plans(row, None, like=specs))
            pairs = zip(specs or found, found, strict=True)
            specs = tuple(old.union(new) for old, new in pairs)
        assert specs is not None
        return specs

    def _plans(
        self,
        row: Packed,
        specs: tuple[PlanSpec, ...] | None,
        like: tuple[PlanSpec, ...] | None = None,
    ) -> list[AttentionPlan]:
        """One plan per mask, in ``specs``, or in its own sizes with as many stages as ``like``."""
        first, *others = (mask(row.segment_ids) for mask in self.masks)
        overlaps = [self.config.overlap] * len(self.masks)
        if like is not None:
            overlaps = [spec.num_remote_stages for spec in like]
        spec, *other_specs = specs or (None,) * len(self.masks)
        config = dataclasses.replace(self.config, overlap=overlaps[0])
        plans = [make_plan(first, self.cp_size, config, spec)]
        for mask, overlap, spec in zip(others, overlaps[1:], other_specs, strict=True):
            plans.append(plans[0].with_mask(mask, overlap=overlap, spec=spec))
        return plans


def _rows(packed: Packed) -> list[Packed]:
    """The sequences of a batch."""
    return [Packed(*fields) for fields in zip(*packed, strict=True)]
