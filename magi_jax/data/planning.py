"""From packed sequences to batches that lie as their plans want them: NumPy on the host."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from magi_jax.data.packing import NO_LABEL, Packed
from magi_jax.data.planned_batch import PlannedBatch
from magi_jax.masks import AttnMask
from magi_jax.parallel import dispatch
from magi_jax.plan import AttentionPlan, PlanConfig, PlanSpec, make_plan, stack_plans
from magi_jax.plan.config import positive
from magi_jax.plan.frame import DOES_NOT_FIT

# What a batch may be: ours, or the dictionary of another pipeline, arrays ``[R, L, ...]`` by name.
Batch = Packed | Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PlanBatch:
    """Plans every sequence of a batch: a function from a batch ``[R, L]`` to a `PlannedBatch`.

    A batch is a `Packed`, or a dictionary of arrays ``[R, L, ...]`` as MaxText, Transformer Engine
    or grain make them, with segment ids of which 0 is padding; all of its arrays are brought into
    dispatched order. Rows that the layout adds are padding too: zero in every array, and
    ``NO_LABEL`` in the labels of a `Packed`.

    It holds no state and can be pickled when its masks can, so it may run in a `Prefetch` thread or
    in the worker processes of a data-loading library (``dataset.map(PlanBatch(...))`` with grain).

    Attributes:
        cp_size: number of ranks that share a sequence.
        masks: each makes a mask of a sequence from its segment ids ``[L]``, and may be shorter than
            the sequence where that ends in padding. The first decides which rank gets which tokens; the
            others use the same dispatch.
        config: the knobs of planning.
        specs: static sizes of the plans, one per mask; batches that share them share a compiled
            program. None takes the sizes that each batch needs. `fit` finds them.
        grow: let a batch that does not fit ``specs`` take larger sizes, which costs a compilation
            of the step, rather than refuse it.
        segment_ids: key of the segment ids in a dictionary: ``"inputs_segmentation"`` for MaxText.
    """

    cp_size: int
    masks: tuple[Callable[[np.ndarray], AttnMask], ...]
    config: PlanConfig = field(default_factory=PlanConfig)
    specs: tuple[PlanSpec, ...] | None = None
    grow: bool = False
    segment_ids: str = "segment_ids"

    def __post_init__(self) -> None:
        if callable(self.masks):
            raise TypeError(
                f"masks must be a tuple of functions, got one: ({self.masks!r},) is meant"
            )
        if not self.masks or not all(map(callable, self.masks)):
            raise TypeError(
                "masks must be functions, at least one, that make the mask of a sequence from its segment"
                f" ids; got {self.masks!r}"
            )
        if not isinstance(self.config, PlanConfig):
            raise TypeError(f"config must be a PlanConfig, got {type(self.config).__name__}")
        positive("cp_size", self.cp_size)

    def __call__(self, packed: Batch) -> PlannedBatch:
        """Plans one batch and lays its tokens out as the plans want them.

        Raises:
            KeyError: a dictionary has no segment ids under the name in ``segment_ids``.
            TypeError: the batch is of another kind, or on the devices already.
            ValueError: the segment ids are not ``[R, L]``, or of another length than ``specs``; or a plan
                does not fit ``specs``, and may not ``grow``, and the size that is too small is named.
        """
        plans = self._in_own_sizes(packed) if self.specs is None else self._fitted(packed)
        moved = dispatch(packed, plans[0])
        if not isinstance(moved, Packed):
            return PlannedBatch.of(moved, plans)
        is_token = np.reshape(plans[0].positions, moved.labels.shape) >= 0
        moved = moved._replace(labels=np.where(is_token, moved.labels, NO_LABEL))
        return PlannedBatch.of(moved, plans)

    def fit(
        self, batches: Iterable[Batch], *, num_batches: int = 16, margin: float = 1.5
    ) -> "PlanBatch":
        """The same with ``specs`` that cover a sample of batches, so that a step compiles once.

        Args:
            batches: batches like those to come.
            num_batches: how many of them to plan.
            margin: buffers are made so many times what the sample needs, at least 1, and tables more
                (`PlanSpec.scaled`). It makes no room for what no batch of the sample has: where none moves a
                key between ranks, a later one that does is refused, unless the planner may grow.
        """
        if margin < 1:
            raise ValueError(f"margin must be at least 1, got {margin}")
        if isinstance(batches, Packed | Mapping):
            raise TypeError("fit takes several batches, such as [batch]; got one of them alone")
        specs = self.specs
        for packed in itertools.islice(batches, num_batches):
            specs = self._specs_of(packed, specs)
        if specs is None:
            raise ValueError("fit needs at least one batch, got none")
        return dataclasses.replace(self, specs=tuple(spec.scaled(margin) for spec in specs))

    def _ids(self, packed: Batch) -> np.ndarray:
        """Segment ids of a batch ``[R, L]``."""
        if isinstance(packed, Packed):
            ids = packed.segment_ids
        elif not isinstance(packed, Mapping):
            raise TypeError(
                "a batch is a Packed or a dictionary of arrays [R, L, ...], got"
                f" {type(packed).__name__}"
            )
        elif self.segment_ids in packed:
            ids = packed[self.segment_ids]
        else:
            raise KeyError(
                f"the batch has no {self.segment_ids!r}, it has {sorted(packed)}: name the array of"
                " segment ids in PlanBatch(segment_ids=...)"
            )
        if not isinstance(ids, np.ndarray):
            raise TypeError(
                "batches are planned on the host, before they go to the devices: the segment ids must be"
                f" a NumPy array, got {type(ids).__name__}"
            )
        if ids.ndim != 2:
            raise ValueError(
                f"segment ids must be [R, L], one row for each sequence; got shape {ids.shape}"
            )
        if self.specs is not None and ids.shape[1] != self.specs[0].seq_len:
            raise ValueError(
                f"the planner was fitted to sequences of {self.specs[0].seq_len} tokens, the batch has"
                f" {ids.shape[1]}: pad batches to one length, or fit a planner for each"
            )
        return ids

    def _fitted(self, packed: Batch) -> tuple[AttentionPlan, ...]:
        """Plans in ``specs``, or in larger sizes where they may grow."""
        assert self.specs is not None
        try:
            return self._in_specs(packed, self.specs)
        except ValueError as error:
            if not (self.grow or str(error).startswith(DOES_NOT_FIT)):
                raise
            # What was chosen for these sizes may need more of them than what is chosen without.
            plans = self._in_own_sizes(packed)
            if self.grow or tuple(plan.spec for plan in plans) == self.specs:
                return plans
            error.add_note(
                "Fit the planner to more batches or with a larger margin (PlanBatch.fit), or let it grow"
                " (PlanBatch(grow=True))."
            )
            raise

    def _in_specs(self, packed: Batch, specs: tuple[PlanSpec, ...]) -> tuple[AttentionPlan, ...]:
        """One plan per mask in ``specs``, stacked over the sequences."""
        of_rows = [self._plans(ids, specs) for ids in self._ids(packed)]
        return tuple(stack_plans(of_mask) for of_mask in zip(*of_rows, strict=True))

    def _in_own_sizes(self, packed: Batch) -> tuple[AttentionPlan, ...]:
        """The same in the smallest sizes that cover all sequences and ``self.specs``."""
        of_rows = [self._plans(ids, None) for ids in self._ids(packed)]
        known = self.specs or (None,) * len(self.masks)
        stacked = []
        for of_mask, spec in zip(zip(*of_rows, strict=True), known, strict=True):
            first, *others = [plan.spec for plan in of_mask] + ([] if spec is None else [spec])
            common = first.union(*others)
            stacked.append(stack_plans([plan.pad_to(common) for plan in of_mask]))
        return tuple(stacked)

    def _specs_of(self, packed: Batch, specs: tuple[PlanSpec, ...] | None) -> tuple[PlanSpec, ...]:
        """The smallest specs that cover the batch and the given specs."""
        for ids in self._ids(packed):
            found = tuple(plan.spec for plan in self._plans(ids, None))
            pairs = zip(specs or found, found, strict=True)
            specs = tuple(old.union(new) for old, new in pairs)
        assert specs is not None
        return specs

    def _plans(self, ids: np.ndarray, specs: tuple[PlanSpec, ...] | None) -> list[AttentionPlan]:
        """One plan per mask, in ``specs`` or in its own sizes."""
        first, *others = (mask(ids) for mask in self.masks)
        spec, *other_specs = specs or (None,) * len(self.masks)
        # A mask may end before the padding does.
        config = dataclasses.replace(self.config, seq_len=self.config.seq_len or len(ids))
        plans = [make_plan(first, self.cp_size, config, spec)]
        options: dict[str, Any] = {
            "overlap": config.overlap,
            # Ranges that were chosen by hand are those of the first mask.
            "travelling": "never" if config.travelling == "never" else "auto",
            "machine": config.machine,
            "engine": config.engine,
        }
        for mask, spec in zip(others, other_specs, strict=True):
            plans.append(plans[0].with_mask(mask, spec=spec, **options))
        return plans
