"""Where figures come from: machine, versions, commit and command, as every result file states them."""

import datetime
import functools
import json
import pathlib
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = pathlib.Path(__file__).resolve().parent / "results"
PLACES = (
    "--commit", "--jobs", "--json", "--out", "--pictures", "--pieces", "--workloads", "--works",
)  # fmt: skip
PACKAGES = (
    "jax", "jaxlib", "numpy", "torch", "tokamax", "flash_attn_3", "dew-flash-attn-cu13", "fa4-jax",
    "magi_attention",
)  # fmt: skip


def describe(commit: str | None = None) -> dict[str, Any]:
    """Machine, versions, commit, command and date of this process.

    Args:
        commit: the commit, where the tree is a copy without git; None asks git.
    """
    return {
        "device": _gpu() or _cpu(),
        "host": f"{_cpu()}, {_cores()} cores",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": commit or _commit(),
        "command": _command(sys.argv),
        "date": datetime.date.today().isoformat(),
    }


def save(path: pathlib.Path, commit: str | None, content: dict[str, Any]) -> None:
    """Writes a result file: what `describe` says, then ``content``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**describe(commit), **content}, indent=1) + "\n")


@functools.cache  # asking takes a second, and files are written often
def _gpu() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    name, driver = found.splitlines()[0].split(", ")
    return f"{name}, driver {driver}"


def _cpu() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _cores() -> int:
    info = pathlib.Path("/proc/cpuinfo")
    return info.read_text().count("model name") if info.exists() else 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD")
        return head + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _command(argv: list[str]) -> str:
    """The command line without what only says where files are and what the commit is."""
    words, rest = ["python", _relative(argv[0])], iter(argv[1:])
    for word in rest:
        if word in PLACES:
            next(rest)
        else:
            words.append(word)
    return shlex.join(words)


def _relative(path: str) -> str:
    full = pathlib.Path(path).resolve()
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else path
