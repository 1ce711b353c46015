"""The two engines of the solvers: the compiled module ``magi_jax._planner`` and its NumPy twins."""

import functools
from types import ModuleType

from magi_jax import compiled_module

ENGINES = ("compiled", "numpy")
# Number of the contract with the compiled module; kInterface in xla_ffi/solver/binding.cc.
INTERFACE = 7
_OTHER_ENGINE = 'engine="numpy": the same plans, more slowly'


def check_engine(engine: str) -> None:
    """Raises ValueError unless ``engine`` is one of `ENGINES`."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {ENGINES}, got {engine!r}")


@functools.cache
def compiled() -> ModuleType:
    """The compiled module; it loads neither JAX nor XLA.

    Raises:
        ImportError: it is not built, or from other sources than these.
    """
    try:
        from magi_jax import _planner
    except ImportError as error:
        raise ImportError(
            "the compiled planner magi_jax._planner is not built; build the package, or choose"
            f" {_OTHER_ENGINE}"
        ) from error
    compiled_module.check_interface(
        getattr(_planner, "interface", None),
        INTERFACE,
        path=_planner.__file__,
        contract="the planner",
        otherwise=f"; or choose {_OTHER_ENGINE}",
    )
    return _planner
