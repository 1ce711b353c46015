"""How and where `dist_attention` runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from magi_jax.comm import Transport
from magi_jax.ops import Implementation
from magi_jax.ops.checks import SUPPORTED_DTYPES
from magi_jax.parallel.region import AxisNames


@dataclass(frozen=True, kw_only=True)
class DistOptions:
    """How and where `dist_attention` runs; what it computes are its arguments. Hashable.

    Make one for a model and pass it to every layer. The defaults are right where mesh axes are explicit,
    or where there is no other axis than that of the rows.

    Attributes:
        batch_axes: automatic mesh axes that B is sharded over: a name, or several.
        head_axes: automatic mesh axes that N and K are sharded over: a name, or several.
        implementation: kernel to use, by name or itself; None chooses by platform.
        deterministic: insist on equal bits for equal inputs, gradients included: kernels with a fixed
            order of sums. The order of sums between ranks is fixed in any case.
        keep_remote_kv: keep the remote keys and values of the forward pass for the backward pass
            instead of fetching them again: less communication, more memory.
        reduce_dtype: dtype in which partial results travel: dK and dV, and of queries that travel
            (`PlanConfig.travelling`) also out and dQ; None is float32. Sums are in float32.
        transport: transport of the group collectives: a name, None for the portable one, or that of
            a `magi_jax.comm.symmetric_memory`.

    Raises:
        TypeError: axes are no names.
        ValueError: ``reduce_dtype`` is none that sums can travel in.
    """

    batch_axes: AxisNames = None
    head_axes: AxisNames = None
    implementation: str | Implementation | None = None
    deterministic: bool = False
    keep_remote_kv: bool = False
    reduce_dtype: Any = None
    transport: str | Transport | None = None

    def __post_init__(self) -> None:
        for name in ("batch_axes", "head_axes"):
            axes = getattr(self, name)
            if axes is None or isinstance(axes, str):
                continue
            if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
                raise TypeError(f"{name} must name mesh axes: one, or several; got {axes!r}")
            object.__setattr__(self, name, tuple(axes))
        if self.reduce_dtype is not None:
            object.__setattr__(self, "reduce_dtype", _wire_dtype(self.reduce_dtype))


def _wire_dtype(dtype: Any) -> jnp.dtype:
    """The dtype that is meant; integers would travel too, and take what is behind the point from sums."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in SUPPORTED_DTYPES:
        raise ValueError(
            f"reduce_dtype must be one of {', '.join(SUPPORTED_DTYPES)}, or None; got {dtype!r}"
        )
    return found
