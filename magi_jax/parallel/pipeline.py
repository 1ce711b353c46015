"""Keys and values on their way to stages, and their gradients on the way back, beside attention.

A transfer in one step runs beside the attention of one stage. One in two steps (`TwoLevelComm`) takes the
attention of two: rows cross between nodes beside one and move inside the node beside the next, so that at
any time a step of either kind is in flight. Two steps in a row would not do: the second has to wait for the
first, and by then attention has all of the device. Before the first remote stage there is one attention
only, so the step inside the node comes after it, and hides behind nothing; in the same way that of the
last gradients comes before the attention over own keys, which hides their way between nodes. Stages whose
rows all come from the own node take the step inside alone, so that neither happens where one is first or
last: its rows move at once, while those of the first stage that has others cross.

Everything here runs where all mesh axes are manual, on the arrays of one rank, and has no derivative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from magi_jax.comm import InFlight, Transport, finish, start_cast, start_reduce
from magi_jax.parallel.overlap import after, barrier, behind
from magi_jax.plan import AnyComm, CommMeta

Arrays = Sequence[jax.Array]
# Sums on their way between nodes: attention does not wait for them, but each keeps its buffers.
MOST_CROSSING = 3
KeysValues = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Link:
    """How arrays move between ranks.

    Attributes:
        axis_name: axis whose ranks exchange them.
        transport: transport of the group collectives.
        wire_dtype: dtype in which partial sums travel; None is theirs. Sums are made in float32.
    """

    axis_name: str
    transport: Transport
    wire_dtype: Any = None

    def start_cast(self, rows: Arrays, step: CommMeta, exposed: bool = False) -> InFlight:
        """Begins a step of a cast; ``exposed``: attention soon waits for it."""
        options: dict[str, Any] = {"transport": self.transport, "exposed": exposed}
        return start_cast(rows, step, self.axis_name, **options)

    def start_reduce(
        self, partials: Arrays, step: CommMeta, onto: Arrays | None = None
    ) -> InFlight:
        """Begins a step of a sum, which is added to ``onto``."""
        options: dict[str, Any] = {"wire_dtype": self.wire_dtype, "transport": self.transport}
        return start_reduce(partials, step, self.axis_name, onto=onto, **options)

    def finish(self, in_flight: InFlight) -> list[jax.Array]:
        """What a step brings."""
        return finish(in_flight, self.transport)

    def keep(self, arrays: Any) -> Any:
        """The same pytree, all of which is computed where some is read: see `Transport.keep`."""
        if self.transport.keep is None:
            return arrays
        leaves, tree = jax.tree.flatten(arrays)
        return jax.tree.unflatten(tree, self.transport.keep(leaves))


class Fetches:
    """Fetches the keys and values of remote stages, ahead of their use.

    Args:
        link: how.
        keys_values: of this rank.
        comm: transfer of each stage, without its ``[cp]`` axis.
        kept: keys and values of each stage that are there already, so that nothing is fetched.
        exposed: whether no attention comes before that of the first stage.
    """

    def __init__(
        self,
        link: Link,
        keys_values: KeysValues,
        comm: Sequence[AnyComm],
        kept: Sequence[KeysValues] = (),
        exposed: bool = False,
    ):
        self.link, self.keys_values, self.kept = link, keys_values, kept
        self.steps = [transfer.steps for transfer in comm]
        self.to_cross = [first for first, *last in self.steps if last]  # that were not started
        self.crossing: list[InFlight] = []  # first of two steps, of one stage or two
        self.arriving: InFlight | None = None  # last step, of the next stage
        if not comm or kept:
            return
        if len(self.steps[0]) == 1:
            self.arriving = link.start_cast(keys_values, self.steps[0][0], exposed)
        else:
            self._cross()
        self._cross()

    def take(self, stage: int, done: tuple) -> tuple[KeysValues, tuple]:
        """Keys and values of a stage, and ``done``, results so far, which they wait for."""
        if self.kept:
            return self.kept[stage], done
        (crossing, arriving), done = barrier((self.crossing, self.arriving), done)
        begun = done
        if arriving is None:  # nothing is left to hide this step behind
            first, *crossing = crossing
            step = self.steps[stage][1]
            rows = self.link.finish(self.link.start_cast(self.link.finish(first), step))
            begun = done, rows
        else:
            rows = self.link.finish(arriving)
        self._start_next(stage + 1, crossing, begun)
        keys, values = rows
        return (keys, values), done

    def _start_next(self, stage: int, crossing: list[InFlight], begun: Any) -> None:
        """Starts what is to run beside the attention before a stage."""
        self.crossing, self.arriving = crossing, None
        if stage >= len(self.steps):
            return
        *crossed, last = self.steps[stage]
        rows: Arrays = self.link.finish(self.crossing.pop(0)) if crossed else self.keys_values
        self.arriving = self.link.start_cast(rows, after(last, begun))
        if crossed:
            self._cross(begun)

    def _cross(self, *begun: Any) -> None:
        """Starts the first step of the next stage that takes two, if there is one."""
        if self.to_cross:
            step = self.to_cross.pop(0)
            step = after(step, *begun) if begun else step
            self.crossing.append(self.link.start_cast(self.keys_values, step))

    def behind_start(self, operand: Any) -> Any:
        """An operand of the computation that what is in flight is to hide behind."""
        for in_flight in (self.arriving, *self.crossing):
            operand = behind(operand, in_flight)
        return operand


class Returns:
    """Brings partial sums of remote stages back to their owners, beside the stages that follow.

    Args:
        link: how.
        total: what the sums are added to, like the rank's own; None for nothing.
    """

    def __init__(self, link: Link, total: list[jax.Array] | None = None):
        self.link = link
        self.total = total
        self.leaving: InFlight | None = None  # first step of the latest partials
        self.steps: tuple[CommMeta, ...] = ()  # those that they still have to take
        self.crossing: list[InFlight] = []

    def give(self, partials: Arrays, comm: AnyComm) -> None:
        """Sends the partial sums of a stage off."""
        *rest, first = comm.steps
        self.steps = tuple(rest)
        self.leaving = self._start(partials, first, is_last=not rest)

    def collect(self, done: jax.Array) -> jax.Array:
        """Takes what ran beside an attention whose result is ``done``, and sends it on."""
        if self.leaving is None and not self.crossing:
            return done
        (leaving, self.crossing), done = barrier((self.leaving, self.crossing), done)
        while len(self.crossing) >= MOST_CROSSING:
            self._add(self.link.finish(self.crossing.pop(0)))
        self._send_on(leaving)
        return done

    def hasten(self) -> None:
        """Has partial sums that were just given take all steps but the last at once, since one attention
        is left.
        """
        if self.steps:
            self._send_on(self.leaving)

    def behind_start(self, operand: Any) -> Any:
        """An operand of the computation that what is in flight is to hide behind."""
        for in_flight in (self.leaving, *self.crossing):
            operand = behind(operand, in_flight)
        return operand

    def _send_on(self, leaving: InFlight | None) -> None:
        if leaving is not None:
            sums = self.link.finish(leaving)
            if self.steps:
                self.crossing.append(self._start(sums, self.steps[-1], is_last=True))
            else:
                self._add(sums)
        self.leaving, self.steps = None, ()

    def plus(self, own: list[jax.Array]) -> list[jax.Array]:
        """What comes back, of which `collect` took the last steps, and the rank's own."""
        while self.crossing:
            self._add(self.link.finish(self.crossing.pop(0)))
        return own if self.total is None else list(map(jnp.add, self.total, own))

    def _start(self, partials: Arrays, step: CommMeta, is_last: bool) -> InFlight:
        """A step of their way; the last one adds to what came back before, which spares a pass over all."""
        onto = None
        if is_last:
            onto, self.total = self.total, None
        return self.link.start_reduce(partials, step, onto)

    def _add(self, sums: list[jax.Array]) -> None:
        self.total = sums if self.total is None else list(map(jnp.add, self.total, sums))
