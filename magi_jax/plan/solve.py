"""Which queries travel, and the work that a layout then asks for."""

import numpy as np

from magi_jax.plan.frame import Frame
from magi_jax.plan.spec import PlanSpec
from magi_jax.solver.cost.machine import Machine
from magi_jax.solver.dispatch import Layout, chunk_edges
from magi_jax.solver.overlap.choose_stages import predict_us
from magi_jax.solver.overlap.travelling import NO_RANGES, Ranges, choose_ranges, split_slices
from magi_jax.solver.work.find_work import Keys, Work, find_work

# "auto", "never", or rising disjoint ranges of query rows.
Travelling = str | tuple[tuple[int, int], ...]


def travelling_ranges(
    travelling: Travelling,
    slices: np.ndarray,
    frame: Frame,
    machine: Machine,
    spec: PlanSpec | None,
    keys_len: int | None = None,
) -> Ranges:
    """Queries that are to travel; with "auto" those that should when tokens lie well.

    Args:
        travelling: what the caller asks for.
        slices: tight visible slices ``[A, 6]``.
        frame: identities of the plan.
        machine: what to predict times for.
        spec: sizes to lay the plan out in; in one without room for them nothing travels by itself.
        keys_len: keys of all ranks; None as many as queries.
    """
    if travelling == "never" or (travelling == "auto" and spec is not None and spec.travel is None):
        return NO_RANGES
    if travelling == "auto":
        edges = chunk_edges(frame.seq_len, frame.chunk_size)
        per_node = machine.node_of(frame.cp_size)
        return choose_ranges(slices, edges, frame.cp_size, per_node, machine.cost_model, keys_len)
    begin, end = np.array(travelling, np.int64).reshape(-1, 2).T
    return Ranges(begin, end)


def machine_of(machine: Machine, cp_size: int, spec: PlanSpec | None) -> Machine:
    """The machine with what a spec settles: whether rows take one step or two, and between which nodes.

    Raises:
        ValueError: the machine asks for the other, or for other nodes.
    """
    if spec is None or not spec.attention_comm:
        return machine
    per_node = spec.ranks_per_node
    if machine.two_level != "auto" and cp_size > machine.node_of(cp_size):
        if machine.two_level != (per_node is not None):
            raise ValueError(
                f"the spec has transfers in {'one step' if per_node is None else 'two steps'}, but"
                f" two_level={machine.two_level}"
            )
    if per_node is None:
        return machine._replace(two_level=False)
    if machine.ranks_per_node not in (None, per_node):
        raise ValueError(
            f"the spec has nodes of {per_node} ranks, but ranks_per_node={machine.ranks_per_node}"
        )
    return machine._replace(ranks_per_node=per_node, two_level=True)


def settle_work(
    slices: np.ndarray,
    ranges: Ranges,
    layout: Layout,
    keys: Keys,
    machine: Machine,
    engine: str,
    may_stay: bool,
) -> Work:
    """The work of a layout.

    Args:
        slices: tight visible slices ``[A, 6]``.
        ranges: queries that travel.
        layout: who owns which queries.
        keys: where keys are.
        machine: what to predict times for.
        engine: "numpy" or "compiled".
        may_stay: keep queries at home after all where that is predicted faster on this layout.
    """
    home, travelling = split_slices(slices, ranges)
    work = find_work(home, travelling, layout, keys, engine)
    if not len(travelling) or not may_stay or layout.cp_size == 1:
        return work
    stay = find_work(slices, slices[:0], layout, keys, engine)
    # With one stage, which tells them apart well enough: whole tables of both would cost too much.
    times_us = [predict_us(each, keys.local_len, machine, (1, 1)) for each in (work, stay)]
    return work if times_us[0] <= times_us[1] else stay
