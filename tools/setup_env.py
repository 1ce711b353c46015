"""Makes the environment that `make demo` and `make test` run in, and keeps it up to date.

Uses the standard library alone. Requirements are installed again when the lists in pyproject.toml
change, and the extension is built again when its sources or the installed jaxlib change; otherwise
this returns at once. Everything that pip and the compiler print goes to ``setup.log`` in the
environment.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG_LINES_SHOWN = 30
# Which CUDA kernels to build where nvcc is found: none, a few that show that all compile, or all.
CUDA_DEFINES = {
    "off": {"MAGI_JAX_CUDA": "OFF"},
    "ci": {"MAGI_JAX_CUDA": "AUTO", "MAGI_JAX_CUDA_KERNELS": "ci"},
    "all": {"MAGI_JAX_CUDA": "AUTO", "MAGI_JAX_CUDA_KERNELS": "all"},
}
BUILD_TOOLS = ["cmake==4.4.5", "ninja==1.13.2"]


def main() -> None:
    """Brings the environment up to date, or explains in one sentence what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="", help="comma-separated extras of pyproject.toml")
    parser.add_argument("--cuda", choices=sorted(CUDA_DEFINES), default="off")
    parser.add_argument(
        "--use-this-python", action="store_true", help="recreate a venv of another one"
    )
    args = parser.parse_args()

    venv = args.venv.absolute()
    if args.use_this_python and _version_of(venv) not in (None, sys.version_info[:3]):
        shutil.rmtree(venv)
    if _version_of(venv) is None:
        _check_tools()
        _create_venv(venv)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = _requirements(project, [name for name in args.extras.split(",") if name])
    digest = _digest(*requirements)
    _step(
        venv,
        f"requirements-{digest[:12]}",  # each list has a stamp: `make docs` and `make test` take turns
        digest,
        f"installing {len(requirements)} requirements",
        ["install", "--upgrade", *requirements],
    )
    build_digest = _digest(args.cuda, _build_digest(venv))
    if not _is_current(venv, "build", build_digest):
        _check_compiler()
    defines = (
        f"--config-settings=cmake.define.{name}={value}"
        for name, value in CUDA_DEFINES[args.cuda].items()
    )
    _step(
        venv,
        "build",
        build_digest,
        "building the extension and installing the package",
        ["install", "--verbose", "--no-build-isolation", "--no-deps", *defines, "-e", str(ROOT)],
    )


def _check_tools() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        sys.exit(
            f"error: {sys.executable} cannot make environments; install its venv module"
            " (Debian and Ubuntu: apt install python3-venv)."
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        sys.exit(
            f"error: the headers of {sys.executable} are missing ({header});"
            " install them (Debian and Ubuntu: apt install python3-dev)."
        )
    _check_compiler()


def _check_compiler() -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        sys.exit(
            "error: no C++ compiler was found; install one (Debian and Ubuntu: apt install g++)"
            " or name it in the variable CXX."
        )


def _version_of(venv: Path) -> tuple[int, int, int] | None:
    """Python version of an environment, or None where there is no working one."""
    code = "import sys, pip; print(*sys.version_info[:3])"
    try:
        result = subprocess.run(
            [venv / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor, micro = map(int, result.stdout.split())
    return major, minor, micro


def _create_venv(venv: Path) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"setup: creating {os.path.relpath(venv, ROOT)} with Python {version}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)


def _requirements(project: dict, extras: list[str]) -> list[str]:
    """What to install before the package itself: its build system, dependencies and extras.

    The build system's own pin of jax is for wheels; here the extension is built with the headers of
    the jaxlib that it will run with.
    """
    optional = project["project"].get("optional-dependencies", {})
    own_name = re.compile(rf"^{re.escape(project['project']['name'])}\[(.*)\]$")
    build = [r for r in project["build-system"]["requires"] if not re.match(r"jax(lib)?\b", r)]
    wanted = [*build, *BUILD_TOOLS, *project["project"]["dependencies"]]
    queue, seen = list(extras), set()
    while queue:
        extra = queue.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in optional:
            sys.exit(
                f"error: there is no extra {extra!r}; choose from {', '.join(sorted(optional))}."
            )
        for requirement in optional[extra]:
            if nested := own_name.match(requirement):
                queue += [name.strip() for name in nested[1].split(",")]
            else:
                wanted.append(requirement)
    return list(dict.fromkeys(wanted))


def _build_digest(venv: Path) -> str:
    """Changes when anything that the extension is built from changes.

    So it does when a Python file comes or goes: an editable install has a list of them.
    """
    sources = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]
    sources += sorted(path for path in (ROOT / "xla_ffi").rglob("*") if path.is_file())
    sources += sorted((ROOT / "cmake").rglob("*.cmake"))
    jaxlib = sorted(path.name for path in venv.glob("lib/python*/site-packages/jaxlib-*.dist-info"))
    python = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "magi_jax").rglob("*.py"))
    return _digest(
        *jaxlib, *python, *(f"{p.relative_to(ROOT)}\n{_digest(p.read_bytes())}" for p in sources)
    )


def _digest(*parts: str | bytes) -> str:
    raw = (part if isinstance(part, bytes) else part.encode() for part in parts)
    return hashlib.sha256(b"\0".join(raw)).hexdigest()


def _is_current(venv: Path, name: str, digest: str) -> bool:
    stamp = venv / f"{name}.stamp"
    return stamp.exists() and stamp.read_text() == digest


def _step(venv: Path, name: str, digest: str, title: str, pip_arguments: list[str]) -> None:
    """Runs pip unless it ran with the same inputs before; shows progress on one line."""
    if _is_current(venv, name, digest):
        return
    start, log = time.monotonic(), venv / "setup.log"
    command = [venv / "bin" / "python", "-u", "-m", "pip", "--disable-pip-version-check"]
    on_terminal = sys.stdout.isatty()
    print(f"setup: {title} (log: {os.path.relpath(log, ROOT)})", flush=True)
    with log.open("a") as out:
        process = subprocess.Popen(
            [*command, *pip_arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            if on_terminal:
                seconds = time.monotonic() - start
                print(f"\r\033[K  {seconds:4.0f} s  {line.strip()[:80]}", end="", flush=True)
    if on_terminal:
        print("\r\033[K", end="")
    if process.wait():
        shown = "\n".join(log.read_text().splitlines()[-LOG_LINES_SHOWN:])
        sys.exit(f"{shown}\nerror: {title} failed; the lines above are the end of {log}.")
    print(f"setup: done in {time.monotonic() - start:.0f} s", flush=True)
    (venv / f"{name}.stamp").write_text(digest)


if __name__ == "__main__":
    main()
