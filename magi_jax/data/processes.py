"""Batches and plans in a job of several processes, each of which plans alone."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

import magi_jax
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

    Raises:
        TypeError: ``sharding`` is none.
    """
    check_sharding(sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(x: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree)


def check_sharding(sharding: object) -> None:
    """Raises TypeError unless this is a sharding."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            "sharding must be a jax.sharding.Sharding, such as NamedSharding(mesh, P('dp', 'cp')); got"
            f" {sharding!r}"
        )


def check_same_plans(plans: Sequence[AttentionPlan]) -> str:
    """Compares plans and versions of magi_jax between all processes of the job; a collective call.

    Args:
        plans: plans with values, on the host.

    Returns:
        The common fingerprint of all of them, 32 hexadecimal digits: that of the plan itself where
        there is one.

    Raises:
        ValueError: processes have different plans or versions, raised on every one of them with the
            processes that differ from process 0 named.
    """
    mine = _summary(plans)
    # Of one size whatever the plans are: processes that differ must meet before they can say so.
    everyone = np.reshape(multihost_utils.process_allgather(mine), (jax.process_count(), -1))
    others = np.flatnonzero((everyone != everyone[0]).any(axis=1))
    if len(others):
        found = {int(process): _describe(everyone[process]) for process in (0, *others)}
        raise ValueError(
            "processes planned differently: they must give make_plan the same mask, config and spec"
            f" with the same version of magi_jax; fingerprints and versions by process: {found}"
        )
    return mine[:FINGERPRINT_BYTES].tobytes().hex()


FINGERPRINT_BYTES, VERSION_BYTES = 16, 48


def _summary(plans: Sequence[AttentionPlan]) -> np.ndarray:
    """Fingerprint and version, uint8 of a fixed size."""
    prints = [bytes.fromhex(plan.fingerprint()) for plan in plans]
    one = prints[0] if len(prints) == 1 else hashlib.sha256(b"".join(prints)).digest()
    version = magi_jax.__version__.encode()[:VERSION_BYTES].ljust(VERSION_BYTES, b"\0")
    return np.frombuffer(one[:FINGERPRINT_BYTES] + version, np.uint8)


def _describe(summary: np.ndarray) -> tuple[str, str]:
    fingerprint, version = np.split(summary, [FINGERPRINT_BYTES])
    return fingerprint.tobytes().hex(), version.tobytes().rstrip(b"\0").decode(errors="replace")
