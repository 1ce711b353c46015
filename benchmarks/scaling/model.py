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
        return staged_us(work, times, our_moves(work, machine), machine)
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
    both_ways = {"forward": Moves(moves), "backward": Moves(moves, moves)}
    return staged_us(work, times, both_ways, machine, merged=False)


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


def staged_us(
    work: Work, times: Times, moves: dict[str, Moves], machine: Machine, merged: bool = True
) -> dict[str, float]:
    """Ours, and the hybrid strategy: casts one stage ahead, reduces behind.

    The forward kernel merges by itself; dQ is added up by XLA, and so is what travelling queries bring.
    """
    add_us = 3 * 4 * work.rows * NUM_HEADS * HEAD_DIM / machine.memory if merged else 0.0
    ends = {}
    for which, cast in (("forward", 0.0), ("backward", add_us)):
        kernels, move = getattr(times, which), moves[which]
        back = np.zeros_like(move.cast) if which == "forward" else move.reduce
        travel, returned = getattr(times, f"travel_{which}"), 0.0
        if travel is not None:
            travel = timeline.TravelWork(move.travel_out, travel, move.travel_back)
            returned = add_us - cast  # counted by the timeline where stages are merged by XLA
        stages = timeline.DirectionWork(kernels.T, move.cast, back, cast, travel)
        ends[which] = timeline.simulate(stages).predicted_us + returned
    # The last cast to bfloat16, after several stages; and what backward adds to its kernels.
    several = merged and len(moves["forward"].cast)
    ends["forward"] += cast_us(work.rows, machine) if several else 0.0
    ends["backward"] += tail_us(work.rows, machine)
    return ends
