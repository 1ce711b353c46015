"""Which implementation serves a call."""

from typing import Any

import jax

from magi_jax.ops import cuda
from magi_jax.ops.base import Implementation
from magi_jax.ops.cpu import CpuImplementation
from magi_jax.ops.reference import ReferenceImplementation

_BY_NAME = {
    "cpu": CpuImplementation(),
    "reference": ReferenceImplementation(),
    "sm80": cuda.SM80,
    "sm90": cuda.SM90,
    "sm90_ordered": cuda.SM90_ORDERED,
}

# What None means, by platform.
_BY_PLATFORM = {"cpu": "cpu"}


def implementations() -> tuple[str, ...]:
    """Names of all implementations."""
    return tuple(_BY_NAME)


def get_implementation(
    implementation: str | Implementation | None = None,
    *,
    deterministic: bool = False,
    platform: str | None = None,
) -> Implementation:
    """The implementation of a name, the one for a platform, or the given one itself.

    Args:
        implementation: a name, an implementation, or None to choose by platform.
        deterministic: whether equal inputs must give equal bits, gradients included.
        platform: where the call runs, such as "gpu"; None is where JAX puts what has no place yet.

    Raises:
        ValueError: there is no implementation of that name.
        NotImplementedError: none is chosen by itself on this platform, or the named one has no fixed
            order of sums.
    """
    chosen = _choose(implementation, deterministic, platform or _default_platform())
    if deterministic and not chosen.is_deterministic:
        raise NotImplementedError(
            f"implementation {chosen.name!r} has no fixed order of sums; deterministic=True needs"
            " another, such as sm80 or sm90_ordered, or None to have one chosen"
        )
    return chosen


def platform_of(x: Any) -> str | None:
    """Platform of the devices that hold a concrete array; None for all else, such as a traced one."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return None
    return next(iter(x.devices())).platform


def _default_platform() -> str:
    config: Any = jax.config  # its options are unknown to type checkers
    chosen = config.jax_default_device
    if chosen is None:
        return jax.default_backend()
    platform = chosen if isinstance(chosen, str) else chosen.platform
    return "gpu" if platform == "cuda" else platform


def _choose(
    implementation: str | Implementation | None, deterministic: bool, platform: str
) -> Implementation:
    if isinstance(implementation, Implementation):
        return implementation
    if implementation is None:
        if platform == "gpu":
            return cuda.for_capability(cuda.device_capability(), deterministic)
        if platform not in _BY_PLATFORM:
            raise NotImplementedError(
                f"no implementation is chosen by itself on platform {platform!r}; pass one of"
                f" {', '.join(_BY_NAME)} as implementation="
            )
        implementation = _BY_PLATFORM[platform]
    if implementation not in _BY_NAME:
        raise ValueError(
            f"implementation must be one of {', '.join(_BY_NAME)}, or None; got {implementation!r}"
        )
    return _BY_NAME[implementation]
