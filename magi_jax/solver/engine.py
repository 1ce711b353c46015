"""The two engines of the solvers: the compiled module ``magi_jax._planner`` and its NumPy twins."""

from types import ModuleType

ENGINES = ("compiled", "numpy")


def check_engine(engine: str) -> None:
    """Raises ValueError unless ``engine`` is one of `ENGINES`."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {ENGINES}, got {engine!r}")


def compiled() -> ModuleType:
    """The compiled module; it loads neither JAX nor XLA.

    Raises:
        ImportError: it is not built.
    """
    try:
        from magi_jax import _planner
    except ImportError as error:
        raise ImportError(
            "the compiled planner magi_jax._planner is not built; build the package, or choose"
            ' engine="numpy": the same plans, more slowly'
        ) from error
    return _planner
