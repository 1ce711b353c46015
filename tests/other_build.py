"""Takes the compiled modules from another build: one with sanitizers, or one that is being tried.

PYTHONPATH=tests python -m pytest -p other_build --extensions build/sanitize tests/ops
"""

import importlib.util
import sys
from pathlib import Path

MODULES = ("_ffi", "_planner")


def use_extensions(folder: Path | str) -> None:
    """Loads `magi_jax._ffi` and `magi_jax._planner` from ``folder``, before anybody else does.

    Raises:
        FileNotFoundError: the folder holds no such module.
        RuntimeError: a module is loaded already.
    """
    for module in MODULES:
        name = f"magi_jax.{module}"
        found = sorted(Path(folder).glob(f"{module}.*.so"))
        if not found:
            raise FileNotFoundError(f"there is no {module}.*.so in {folder}")
        if name in sys.modules:
            raise RuntimeError(f"{name} is loaded already, from {sys.modules[name].__file__}")
        spec = importlib.util.spec_from_file_location(name, found[0])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def pytest_addoption(parser):
    parser.addoption("--extensions", help="folder with the compiled modules to test")


def pytest_configure(config):
    folder = config.getoption("--extensions")
    if folder:
        use_extensions(folder)
