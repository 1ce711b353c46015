"""What a wheel holds: nothing of the package is left out by a pattern that means something else."""

import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    renamed = _tool("build_wheel").with_local_version(wheel, "cuda13")
    assert renamed.name == "thing-1.0+cuda13-py3-none-any.whl"
    assert not wheel.exists()
    with zipfile.ZipFile(renamed) as archive:
        folder = "thing-1.0+cuda13.dist-info"
        assert "\nVersion: 1.0+cuda13\n" in archive.read(f"{folder}/METADATA").decode()
        listed = [line.split(",")[0] for line in archive.read(f"{folder}/RECORD").decode().split()]
        assert sorted(listed) == sorted(archive.namelist())


def test_what_wheels_are_made_with_is_pinned():
    tool = _tool("build_wheel")
    for requirement in (*tool.AUDITWHEEL, *(each for v in tool.NVCC_WHEELS.values() for each in v)):
        assert re.fullmatch(r"[\w\-]+==[\d.]+", requirement), requirement


def test_wheel_with_a_library_of_others_is_refused(tmp_path):
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("_ffi.abi3.so", "_planner.abi3.so", "libcudart.so.13"):
            archive.writestr(f"magi_jax/{name}", b"")
    with pytest.raises(SystemExit, match=r"it holds .*libcudart\.so\.13"):
        _tool("check_wheel").check_contents(wheel)
    compiled = importlib.util.find_spec("magi_jax._ffi").origin
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("_ffi.abi3.so", "_planner.abi3.so"):
            archive.write(compiled, f"magi_jax/{name}")
    _tool("check_wheel").check_contents(wheel)


def test_only_the_system_s_libraries_may_be_needed():
    allowed = _tool("check_wheel").SYSTEM_LIBRARIES
    assert all(map(allowed.fullmatch, ("libc.so.6", "libstdc++.so.6", "ld-linux-x86-64.so.2")))
    assert not any(map(allowed.fullmatch, ("libcuda.so.1", "libcudart.so.13", "libcrypt.so.1")))


def test_ci_compiles_each_pair_of_head_dims_once_for_hopper():
    """Both types are among them, so that no kernel and no path of a type is first compiled at night."""
    left_out = re.search(r'EXCLUDE REGEX "(.*)"\)', (ROOT / "xla_ffi/cuda.cmake").read_text())[1]
    names = [path.name for path in (ROOT / "xla_ffi/kernels/sm90").glob("*_hdim*.cu")]
    kept = [name[:-3].rsplit("_", 1) for name in names if not re.search(left_out, name)]
    assert sorted(kernel for kernel, _ in kept) == sorted(
        {name.rsplit("_", 1)[0] for name in names}
    )
    for direction in ("forward", "backward"):
        assert {t for kernel, t in kept if kernel.startswith(direction)} == {"bf16", "f16"}
