"""What a wheel holds: nothing of the package is left out by a pattern that means something else."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_exclusions_are_anchored():
    """`build*` without a slash in front would leave builders.py out of the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["scikit-build"]["sdist"]["exclude"]
    assert all(pattern.startswith("/") for pattern in patterns)


def test_nothing_of_the_package_is_ignored_by_git():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert "*.py" not in ignored
    names = {path.name for path in (ROOT / "magi_jax").rglob("*") if path.suffix != ".so"}
    loose = [p.strip("/") for p in ignored if not p.startswith("/") and "*" not in p]
    assert not {name for name in names if name in loose and not name.startswith("__pycache__")}
