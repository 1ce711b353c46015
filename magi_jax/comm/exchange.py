"""Bytes passed between processes at set-up, over the key-value store of `jax.distributed`."""

from collections.abc import Iterable
from typing import Any

import jax


def exchange(key: str, payload: bytes, processes: Iterable[int], timeout_s: float) -> list[bytes]:
    """Gives ``payload`` to other processes and returns theirs, in the order of ``processes``.

    Every process of ``processes`` calls it with the same ``key``, which serves once.

    Raises:
        RuntimeError: `jax.distributed` is not initialised, or a process did not come in time.
    """
    processes = list(processes)
    own = jax.process_index()
    if processes == [own]:
        return [payload]
    client = _client()
    client.key_value_set_bytes(f"{key}/{own}", payload)
    payloads = []
    for process in processes:
        if process == own:
            payloads.append(payload)
            continue
        try:
            payloads.append(
                client.blocking_key_value_get_bytes(f"{key}/{process}", int(timeout_s * 1e3))
            )
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                f"process {process} did not come to {key!r} within {timeout_s} s (this is process"
                f" {own})"
            ) from error
    return payloads


def meet(key: str, timeout_s: float) -> None:
    """Waits until every process of the program is here; ``key`` serves once."""
    if jax.process_count() > 1:
        _client().wait_at_barrier(key, int(timeout_s * 1e3))


def _client() -> Any:
    from jax._src import distributed  # JAX has no public way to its key-value store

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed.initialize() must come before the first exchange")
    return client
