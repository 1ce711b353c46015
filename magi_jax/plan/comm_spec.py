"""Static sizes of transfers, in one step or in two."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from magi_jax.plan.sizes import (
    MIN_BUFFER_ROWS,
    MIN_ENTRIES,
    MIN_PAIR_ROWS,
    Sizes,
    bucket,
    capacity,
    entries_factor,
    rounded,
)


@dataclass(frozen=True)
class CommSpec(Sizes):
    """Sizes of one `CommMeta`.

    Attributes:
        cp_size: number of ranks.
        src_rows: rows of the local input.
        dst_rows: rows of the buffer that is written.
        pair_rows: rows of the block of each ordered pair of different ranks.
        self_rows: most rows that a rank copies to itself; 0 when no row stays (every remote stage that
            takes one step).
        pieces: capacity ``L`` of ``send`` and ``recv``.
        peers, stride: rows move only inside groups of ``peers`` ranks that lie ``stride`` apart; 0 peers are
            all ranks.
    """

    cp_size: int
    src_rows: int
    dst_rows: int = dataclasses.field(metadata=capacity(None))
    pair_rows: int = dataclasses.field(metadata=capacity(MIN_PAIR_ROWS))
    self_rows: int = dataclasses.field(metadata=capacity())
    pieces: int = dataclasses.field(metadata=capacity(MIN_ENTRIES))
    peers: int = 0
    stride: int = 1

    @property
    def is_near(self) -> bool:
        """Whether rows stay inside groups of ranks, as those of own nodes do."""
        return self.peers > 0

    @property
    def num_peers(self) -> int:
        """Ranks of a group, the rank itself among them."""
        return self.peers or self.cp_size

    @property
    def wire_rows(self) -> int:
        """Rows of the operand of the portable collective on each rank, padding included."""
        return self.num_peers * self.pair_rows

    @property
    def steps(self) -> "tuple[CommSpec, ...]":
        """The transfers that this one is made of: itself."""
        return (self,)

    def in_two(self, ranks_per_node: int) -> "TwoLevelSpec":
        """Sizes that are enough for the two steps of any transfer of this spec."""
        nodes = self.cp_size // ranks_per_node
        to_node = min(self.src_rows, ranks_per_node * self.pair_rows)
        from_relay = min(self.dst_rows, nodes * self.pair_rows)
        pieces = ranks_per_node * self.pieces
        return TwoLevelSpec(
            self.cp_size,
            ranks_per_node,
            self.src_rows,
            bucket(nodes * to_node, MIN_BUFFER_ROWS),
            self.dst_rows,
            StepSpec(bucket(to_node, MIN_PAIR_ROWS), bucket(to_node), bucket(pieces, MIN_ENTRIES)),
            StepSpec(
                bucket(from_relay, MIN_PAIR_ROWS),
                bucket(from_relay),
                bucket(max(pieces, nodes * self.pieces), MIN_ENTRIES),
            ),
        ).rounded()


@dataclass(frozen=True)
class StepSpec(Sizes):
    """Sizes of one step of a `TwoLevelComm`; names as in `CommSpec`."""

    pair_rows: int = dataclasses.field(metadata=capacity(MIN_PAIR_ROWS))
    self_rows: int = dataclasses.field(metadata=capacity())
    pieces: int = dataclasses.field(metadata=capacity(MIN_ENTRIES))


@dataclass(frozen=True)
class TwoLevelSpec(Sizes):
    """Sizes of a `TwoLevelComm`.

    Attributes:
        cp_size: number of ranks.
        ranks_per_node: ranks of a node.
        src_rows: rows of the local input.
        relay_rows: rows of the buffer in between.
        dst_rows: rows of the buffer that is written.
        first: sizes of the step across nodes.
        second: sizes of the step inside nodes.
    """

    cp_size: int
    ranks_per_node: int
    src_rows: int
    relay_rows: int = dataclasses.field(metadata=capacity(None))
    dst_rows: int = dataclasses.field(metadata=capacity(None))
    first: StepSpec
    second: StepSpec

    @property
    def is_near(self) -> bool:
        """Rows cross between nodes."""
        return False

    @property
    def across(self) -> CommSpec:
        """The step across nodes, between ranks with the same place in theirs."""
        nodes = self.cp_size // self.ranks_per_node
        return self._step(self.src_rows, self.relay_rows, self.first, nodes, self.ranks_per_node)

    @property
    def within(self) -> CommSpec:
        """The step inside nodes."""
        return self._step(self.relay_rows, self.dst_rows, self.second, self.ranks_per_node, 1)

    def _step(
        self, src_rows: int, dst_rows: int, sizes: StepSpec, peers: int, stride: int
    ) -> CommSpec:
        rows = sizes.pair_rows, sizes.self_rows, sizes.pieces
        return CommSpec(self.cp_size, src_rows, dst_rows, *rows, peers, stride)

    @property
    def steps(self) -> tuple[CommSpec, ...]:
        """The transfers that this one is made of, in order."""
        return self.across, self.within

    @property
    def wire_rows(self) -> int:
        """Rows of the operands of the portable collectives on each rank, padding included."""
        return sum(step.wire_rows for step in self.steps)

    def in_two(self, ranks_per_node: int) -> "TwoLevelSpec":
        """These sizes; those of other nodes are of another kind."""
        return self


AnyCommSpec = CommSpec | TwoLevelSpec


def grown(spec: AnyCommSpec, factor: float) -> Any:
    """A transfer with room for ``factor`` times as many rows, within what ranks can hold."""
    if isinstance(spec, TwoLevelSpec):
        nodes = spec.cp_size // spec.ranks_per_node
        first = grown(spec.across, factor)
        # A relay gets no more than all rows of one rank of each node.
        relay_rows = min(first.dst_rows, bucket(nodes * spec.src_rows, MIN_BUFFER_ROWS))
        relay_rows = max(relay_rows, spec.relay_rows)
        second = grown(dataclasses.replace(spec, relay_rows=relay_rows).within, factor)
        return dataclasses.replace(
            spec,
            relay_rows=relay_rows,
            dst_rows=second.dst_rows,
            first=_step(first, factor, spec.src_rows),
            second=_step(second, factor, second.dst_rows),
        )
    wide = rounded(spec, None, factor)
    pair_rows = max(min(wide.pair_rows, spec.src_rows), spec.pair_rows)
    arriving = bucket(math.ceil(spec.dst_rows * factor), MIN_BUFFER_ROWS)
    sources = spec.num_peers - (not spec.self_rows)
    most = bucket(sources * spec.src_rows, MIN_BUFFER_ROWS)
    return dataclasses.replace(
        wide,
        dst_rows=max(min(arriving, most), spec.dst_rows),
        pair_rows=pair_rows,
        self_rows=spec.self_rows,
        pieces=bucket(math.ceil(spec.pieces * entries_factor(factor)), MIN_ENTRIES),
    )


def _step(spec: CommSpec, factor: float, most: int) -> StepSpec:
    """Sizes of a step, with room for as many rows more to stay, ``most`` at most."""
    self_rows = max(min(bucket(math.ceil(spec.self_rows * factor)), most), spec.self_rows)
    return StepSpec(spec.pair_rows, self_rows, spec.pieces)
