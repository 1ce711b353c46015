"""The two engines of the solvers: the compiled module ``magi_jax._planner`` and its NumPy twins."""

import functools
from types import ModuleType

ENGINES = ("compiled", "numpy")
# Number of the contract with the compiled module; kInterface in xla_ffi/solver/binding.cc.
INTERFACE = 2


def check_engine(engine: str) -> None:
    """Raises ValueError unless ``engine`` is one of `ENGINES`."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {ENGINES}, got {engine!r}")


def check_interface(found: int | None, path: str | None) -> None:
    """Raises ImportError when the compiled module is of another version than these sources.

    Args:
        found: interface number of the module; None where it is older than this number.
        path: file of the module, for the message.
    """
    if found == INTERFACE:
        return
    raise ImportError(
        f"{path} has interface {found} of the planner, but these sources of magi_jax need {INTERFACE}:"
        " it was built from another version. Build it again: make setup in a clone, or pip install"
        " --no-build-isolation --no-deps --force-reinstall on its folder; or choose"
        ' engine="numpy": the same plans, more slowly'
    )


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
            ' engine="numpy": the same plans, more slowly'
        ) from error
    check_interface(getattr(_planner, "interface", None), _planner.__file__)
    return _planner
