"""When the ranks of a strategy are done: kernel times laid side by side with modelled transfers.

Every link is free of contention from other jobs; a rank sends and receives at the full rate at once. What a
strategy can hide behind its kernels is hidden. Where its code could be read in two ways, the better counts.
"""

import numpy as np
from baselines import strategies

from magi_jax.solver.cost import schedule, timeline
from magi_jax.solver.cost.model import CostModel
from scaling.backward import backward_us
from scaling.machine import Machine, Moves, Times, cast_us, elements, tail_us
from scaling.rings import gather_us, head_ring_us
from scaling.work import HEAD_DIM, NODE, NUM_HEADS, NUM_KV_HEADS, Work


def step_us(name: str, work: Work, times: Times, num_ranks: int, machine: Machine) -> dict:
    """Microseconds of the slowest rank, ``{"forward": .., "backward": ..}``."""
    if work.traffic is not None:
        machine = machine._replace(grad_bytes=2) if work.alike else machine
        return our_us(work, times, our_moves(work, machine), machine)
    strategy = strategies.make(name, num_ranks, NODE)
    if isinstance(strategy, strategies.HeadRing):
        return {
            "forward": head_ring_us(strategy, work, times.forward, machine, False),
            "backward": head_ring_us(strategy, work, times.backward, machine, True),
        }
    if isinstance(strategy, strategies.AllGather):
        gather = gather_us(num_ranks, work.rows, machine)
        tail = tail_us(work.rows, machine, parts=False)
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
        "forward": schedule.simulate(forward).predicted_us,
        # A row is in one level: the call of that level writes its dQ.
        "backward": schedule.simulate(backward).predicted_us
        + tail_us(work.rows, machine, parts=False),
    }


def our_moves(work: Work, machine: Machine) -> dict[str, Moves]:
    """Transfers of a plan by pass."""
    ranks = work.traffic.shape[-1]
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
    directions = (
        ("forward", work.traffic, work.near),
        ("backward", work.backward_traffic, work.backward_near),
    )
    for which, traffic, near in directions:
        steps = [timeline.link_rows(traffic[:, step], node) for step in range(traffic.shape[1])]
        (cast, reduce), *within = ((model.cast_us(*x), model.reduce_us(*x)) for x in steps)
        found = Moves(cast, reduce, np.stack(within[0]) if within else None, near=near)
        if work.travel_traffic is not None:
            rows = [timeline.link_rows(step, node) for step in work.travel_traffic]
            out, back = (
                np.sum([model.move_us(*step, size) for step in rows], axis=0)
                for size in model.travel_bytes(which == "backward")
            )
            found = found._replace(travel_out=out, travel_back=back)
        moves[which] = found
    if work.alike:
        moves["backward"] = _without_casts(moves["backward"])
    return moves


def _without_casts(moves: Moves) -> Moves:
    """Keys and values are there from the forward pass; queries that travel do so again."""
    within = moves.within
    if within is not None:
        within = np.stack([np.zeros_like(within[0]), within[1]])
    return moves._replace(cast=np.zeros_like(moves.cast), within=within)


def our_us(work: Work, times: Times, moves: dict[str, Moves], machine: Machine) -> dict[str, float]:
    """Ours: casts one stage ahead, reduces behind; what XLA adds up or copies beside the kernels."""
    ends = {"forward": _forward_us(work, times, moves["forward"], machine)}
    # The float32 result to bfloat16, where it had several parts.
    several = len(moves["forward"].cast) > 0 and not work.late_rows
    if several or times.travel_forward is not None:
        ends["forward"] += cast_us(work.rows, machine)
    ends["backward"] = backward_us(work, times, moves["backward"], machine)
    return ends


def _forward_us(work: Work, times: Times, moves: Moves, machine: Machine) -> float:
    """Own keys come first and hide the first cast; the kernel merges by itself."""
    travel, returned = None, 0.0
    if times.travel_forward is not None:
        travel = timeline.TravelWork(moves.travel_out, times.travel_forward, moves.travel_back)
        returned = 3 * 4 * elements(work.rows) / machine.memory
    nothing = np.zeros_like(moves.cast)
    within = None if moves.within is None else np.stack([moves.within[0], nothing])
    stages = timeline.DirectionWork(
        times.forward.T, moves.cast, nothing, 0.0, travel, within, near=moves.near
    )
    return schedule.simulate(stages).predicted_us + returned
