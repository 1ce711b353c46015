"""What a wheel holds: nothing of the package is left out by a pattern that means something else."""

import importlib.util
import tomllib
import zipfile
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


def test_local_version_is_written_everywhere(tmp_path):
    """Name, metadata and record of a wheel agree after it was renamed."""
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "x = 1\n")
        archive.writestr("thing-1.0.dist-info/METADATA", "Name: thing\nVersion: 1.0\n\nText\n")
        archive.writestr("thing-1.0.dist-info/RECORD", "stale")
    path = ROOT / "tools" / "build_wheel.py"
    spec = importlib.util.spec_from_file_location("build_wheel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    renamed = module.with_local_version(wheel, "cuda13")
    assert renamed.name == "thing-1.0+cuda13-py3-none-any.whl"
    assert not wheel.exists()
    with zipfile.ZipFile(renamed) as archive:
        folder = "thing-1.0+cuda13.dist-info"
        assert "\nVersion: 1.0+cuda13\n" in archive.read(f"{folder}/METADATA").decode()
        listed = [line.split(",")[0] for line in archive.read(f"{folder}/RECORD").decode().split()]
        assert sorted(listed) == sorted(archive.namelist())
