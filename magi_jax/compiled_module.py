"""What both compiled modules, ``_ffi`` and ``_planner``, have in common."""


def check_interface(
    found: int | None, needed: int, *, path: str | None, contract: str, otherwise: str = ""
) -> None:
    """Raises ImportError when a compiled module is of another version than these sources.

    Args:
        found: interface number of the module; None where it is older than such numbers.
        needed: that of the sources.
        path: file of the module, for the message.
        contract: what the number is of, for the message.
        otherwise: what else can be done than building the module again.
    """
    if found == needed:
        return
    raise ImportError(
        f"{path} has interface {found} of {contract}, but these sources of magi_jax need {needed}: it was"
        " built from another version. Build it again: make setup in a clone, or pip install"
        f" --no-build-isolation --no-deps --force-reinstall on its folder{otherwise}."
    )
