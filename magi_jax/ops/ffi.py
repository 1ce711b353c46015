"""Loads the extension module, checks that the running jaxlib accepts it, and registers its targets."""

import functools
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jaxlib

import magi_jax
from magi_jax import compiled_module

# Number of the contract with the compiled module; kInterface in xla_ffi/common/registration.h. Called with
# the wrong operands, XLA would say "Wrong number of results", or nothing at all where only the meaning of a
# table changed.
INTERFACE = 5

# What to say where a build without CUDA is asked for it.
NO_CUDA = (
    "this build of magi_jax has no CUDA kernels: where it was made no nvcc was found, or MAGI_JAX_CUDA was"
    " OFF; install it again with an nvcc in reach (in a clone: make setup CUDA_KERNELS=all)"
)


def target(name: str) -> str:
    """What a custom call of the compiled module is registered as.

    The name ends with the number of the interface: a program that was exported with another one finds no
    call of its name and is refused, rather than run with operands that mean something else now.
    """
    return f"{name}_v{INTERFACE}"


def runtime_ffi_api_version() -> tuple[int, int]:
    """XLA FFI API version ``(major, minor)`` of the running jaxlib, from the header that it ships."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    versions = [
        re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")
    ]
    major, minor = (int(found[1]) if found else -1 for found in versions)
    if major < 0 or minor < 0:
        raise ImportError(f"no XLA FFI API version was found in {header}")
    return major, minor


def check_ffi_api_version(
    built: tuple[int, int], running: tuple[int, int], *, built_jaxlib: str, running_jaxlib: str
) -> None:
    """Raises ImportError when a runtime would refuse a library.

    XLA takes libraries with its own major version and a minor version that is not newer than its own.
    Registering any other gives confusing errors much later ("No FFI handler registered", or a CPU backend
    that cannot start), so this is said at once.

    Args:
        built: version of the headers that the library was built with.
        running: version of the running jaxlib.
        built_jaxlib: version of the jaxlib that the headers came from.
        running_jaxlib: version of the running jaxlib.
    """
    if built[0] == running[0] and built[1] <= running[1]:
        return
    raise ImportError(
        f"magi_jax was built with the XLA FFI headers of jaxlib {built_jaxlib} (API {built[0]}.{built[1]}),"
        f" but the running jaxlib {running_jaxlib} has API {running[0]}.{running[1]} and accepts only"
        f" {running[0]}.0 to {running[0]}.{running[1]}. Install jaxlib {built_jaxlib} or newer, or build"
        " magi_jax again in this environment: pip install --no-build-isolation --force-reinstall magi_jax."
    )


@functools.cache
def load() -> ModuleType:
    """The extension module with its targets registered; the registration happens on the first call.

    Raises:
        ImportError: the extension is not built, is of another version than these sources, or the
            running jaxlib does not accept it.
    """
    try:
        module = importlib.import_module("magi_jax._ffi")
    except ImportError as error:
        raise ImportError(
            "the compiled part of magi_jax is missing or cannot be loaded; install the package (in a clone:"
            " pip install --no-build-isolation -e .) rather than importing its sources alone"
        ) from error
    info = module.build_info()
    compiled_module.check_interface(
        info.get("interface"), INTERFACE, path=module.__file__, contract="the custom calls"
    )
    check_ffi_api_version(
        info["ffi_api_version"],
        runtime_ffi_api_version(),
        built_jaxlib=info["jaxlib_version"],
        running_jaxlib=jaxlib.__version__,
    )
    for name, platform, stages in module.registrations():
        jax.ffi.register_ffi_target(target(name), stages, platform=platform)
    return module


def build_info() -> dict[str, Any]:
    """What is installed and how it was built: quote it in reports of problems.

    Returns:
        ``version`` of this package; ``interface`` of its custom calls; ``ffi_api_version`` and
        ``jaxlib_version`` of the headers that the extension was built with;
        ``running_jaxlib_version``; ``cpu_kernels``, the instruction set in use; ``cuda``, whether the
        CUDA kernels are there, and then the ``cuda_version`` that built them and the
        ``cuda_architectures`` with code of their own; and ``targets``, the names of all custom calls,
        which `jax.export` must be told to let pass.
    """
    module = load()
    return {
        "version": magi_jax.__version__,
        **module.build_info(),
        "running_jaxlib_version": jaxlib.__version__,
        "targets": sorted({target(name) for name, _, _ in module.registrations()}),
    }
