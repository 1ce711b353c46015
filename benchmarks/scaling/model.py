"""When the ranks of a strategy are done: kernel times laid side by side with modelled transfers.

Every link is free of contention from other jobs; a rank sends and receives at the full rate at once. What a
strategy can hide behind its kernels is hidden. Where its code could be read in two ways, the better counts.
"""

from typing import NamedTuple

import numpy as np
from baselines import strategies

from magi_jax.solver import timeline
from magi_jax.solver.cost_model import CostModel
from scaling.machine import Machine, Times, cast_us, tail_us
from scaling.rings import gather_us, head_ring_us
from scaling.work import HEAD_DIM, NODE, NUM_HEADS, NUM_KV_HEADS, Work


def step_us(name: str, work: Work, times: Times, num_ranks: int, machine: Machine) -> dict:
    """Microseconds of the slowest rank, ``{"forward": .., "backward": ..}``."""
    if work.traffic is not None:
        return our_us(work, times, our_moves(work, machine), machine)
    strategy = strategies.make(name, num_ranks, NODE)
    if isinstance(strategy, strategies.HeadRing):
        return {
            "forward": head_ring_us(strategy, work, times.forward, machine, False),
            "backward": head_ring_us(strategy, work, times.backward, machine, True),
        }
    if isinstance(strategy, strategies.AllGather):
        gather = gather_us(num_ranks, work.rows, machine)
        tail = tail_us(work.rows, machine)
        return {
            "forward": gather + times.forward.max(),
            # Gathered again, and summed back to the owners.
            "backward": 2 * gather + times.backward.max() + tail,
        }
    moves = np.array(
        [[gather_us(size, rows, machine)] * num_ranks
         for size, rows in zip(work.level_sizes, work.level_rows, strict=True)]
    )  # fmt: skip
    if work.level_sizes[0] == 1:
        moves = moves[1:]
    else:  # nothing to compute before the first keys arrive
        nothing = np.zeros((num_ranks, 1))
        both = (np.concatenate([nothing, t], axis=1) for t in (times.forward, times.backward))
        times = Times(*both)
    nothing = np.zeros_like(moves)
    forward, backward = (
        timeline.DirectionWork(kernels.T, moves, back)
        for kernels, back in ((times.forward, nothing), (times.backward, moves))
    )
    return {
        "forward": timeline.simulate(forward).predicted_us,
        "backward": timeline.simulate(backward).predicted_us + tail_us(work.rows, machine),
    }


class Moves(NamedTuple):
    """Microseconds of casts and reduces ``[stages, ranks]``, and of travelling queries ``[ranks]``."""

    cast: np.ndarray
    reduce: np.ndarray | None = None
    travel_out: np.ndarray | None = None
    travel_back: np.ndarray | None = None


def our_moves(work: Work, machine: Machine) -> dict[str, Moves]:
    """Transfers of a plan by pass."""
    ranks = work.traffic.shape[1]
    node = min(machine.node, ranks)
    model = CostModel(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        grad_bytes=machine.grad_bytes,
        link_gbps=machine.near / 1e3,
        node_link_gbps=machine.far / 1e3,
        latency_us=machine.far_latency_us if ranks > NODE else machine.near_latency_us,
    )
    moves = {}
    for which, traffic, within in (
        ("forward", work.traffic, work.within),
        ("backward", work.backward_traffic, work.backward_within),
    ):
        # Of two levels, the second begins when the first is done.
        levels = [timeline.link_rows(rows, node) for rows in (traffic, within) if rows is not None]
        moves[which] = Moves(
            sum(model.cast_us(*rows) for rows in levels),
            sum(model.reduce_us(*rows) for rows in levels),
        )
        if work.travel_traffic is not None:
            rows = timeline.link_rows(work.travel_traffic, node)
            out, back = (
                model.move_us(*rows, size) for size in model.travel_bytes(which == "backward")
            )
            moves[which] = moves[which]._replace(travel_out=out, travel_back=back)
    return moves


def our_us(work: Work, times: Times, moves: dict[str, Moves], machine: Machine) -> dict[str, float]:
    """Ours: casts one stage ahead, reduces behind; what XLA adds up or copies beside the kernels."""
    several = (
        len(moves["forward"].cast) > 0 and not work.late_rows
    ) or times.travel_forward is not None
    # The float32 result to bfloat16, where it had several parts; late rows gathered and put back.
    ends = {"forward": _forward_us(work, times, moves["forward"], machine)}
    ends["forward"] += cast_us(work.rows, machine) if several else 0.0
    ends["forward"] += _elements(work.late_rows) * (4 + 4) / machine.memory
    ends["backward"] = _backward_us(work, times, moves["backward"], machine)
    # Of q, dout and out, and dQ in bfloat16.
    ends["backward"] += _elements(work.late_rows) * (3 * 4 + 4) / machine.memory
    return ends


def _elements(rows: int) -> float:
    """Of rows of all query heads."""
    return rows * NUM_HEADS * HEAD_DIM


def _forward_us(work: Work, times: Times, moves: Moves, machine: Machine) -> float:
    """Own keys come first and hide the first cast; the kernel merges by itself."""
    travel, returned = None, 0.0
    if times.travel_forward is not None:
        travel = timeline.TravelWork(moves.travel_out, times.travel_forward, moves.travel_back)
        returned = 3 * 4 * _elements(work.rows) / machine.memory
    nothing = np.zeros_like(moves.cast)
    stages = timeline.DirectionWork(times.forward.T, moves.cast, nothing, 0.0, travel)
    return timeline.simulate(stages).predicted_us + returned


def _backward_us(work: Work, times: Times, moves: Moves, machine: Machine) -> float:
    """Own keys come last and hide the last reduce; ``delta`` is made beside the first cast.

    A rank has one link and one stream of kernels. The dQ of a stage is added by XLA to those before.
    """
    kernels = times.backward.T
    stages, ranks = moves.cast.shape
    add_us = 3 * 4 * _elements(work.rows) / machine.memory
    link, arrived, returned = np.zeros((3, ranks))
    if times.travel_backward is not None:
        link = visitors = moves.travel_out
    busy = np.full(ranks, 4 * _elements(work.rows) / machine.memory)  # delta
    if stages:
        link = arrived = link + moves.cast[0]
    for stage in range(stages):
        begin = np.maximum(busy, arrived)
        if stage + 1 < stages:
            link = arrived = np.maximum(link, begin) + moves.cast[stage + 1]
        busy = begin + kernels[stage + 1] + add_us * (stage > 0)
        busy = np.maximum(busy, returned)  # one reduce in flight
        link = returned = np.maximum(link, busy) + moves.reduce[stage]
    busy = busy + kernels[0]
    if times.travel_backward is not None:
        busy = np.maximum(busy, visitors) + times.travel_backward
        returned = np.maximum(link, busy) + moves.travel_back
        busy = busy + add_us
    # The last sum of dQ is one with its way to bfloat16; so are those of dK and dV, of which few are.
    several = stages > 0 and not work.late_rows
    parts = 2 if several or times.travel_backward is not None else 1
    last_us = (4 * parts + 2) * _elements(work.rows) / machine.memory
    last_us += (
        (4 * (1 + (stages > 0)) + 2) * 2 * work.rows * NUM_KV_HEADS * HEAD_DIM / machine.memory
    )
    return float(np.maximum(busy, returned).max()) + last_us
