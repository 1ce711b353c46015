"""Batches and plans in a job of several processes, each of which plans alone."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from magi_jax.plan import AttentionPlan


def place(tree: Any, sharding: Sharding) -> Any:
    """Puts whole host arrays onto the devices of all processes; each process feeds its own shards.

    Nothing travels between processes and nothing is compared: every process must hold the same
    arrays, as it does when it made them from the same seed or file (`check_same_plans` compares
    plans). In one process this is `jax.device_put`.

    Args:
        tree: pytree of NumPy arrays, the same whole arrays on every process.
        sharding: how each of them is sharded.

    Returns:
        The pytree with global device arrays of the same shapes.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(x: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree)


def check_same_plans(plans: Sequence[AttentionPlan]) -> str:
    """Compares the fingerprints of plans between all processes of the job; a collective call.

    Args:
        plans: plans with values, on the host.

    Returns:
        The common fingerprint of all of them, hexadecimal.

    Raises:
        ValueError: processes have different plans, raised on every one of them with the processes
            that differ from process 0 named.
    """
    mine = np.concatenate(
        [np.frombuffer(bytes.fromhex(plan.fingerprint()), np.uint8) for plan in plans]
    )
    everyone = np.reshape(multihost_utils.process_allgather(mine), (jax.process_count(), -1))
    others = np.flatnonzero((everyone != everyone[0]).any(axis=1))
    if len(others):
        prints = {int(process): bytes(everyone[process]).hex() for process in (0, *others)}
        raise ValueError(
            "processes planned differently: they must give make_plan the same mask, config and spec"
            f" with the same version of magi_jax; fingerprints by process: {prints}"
        )
    return bytes(mine).hex()
