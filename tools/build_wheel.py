"""Builds a wheel into dist/ in an isolated environment, with the oldest supported jaxlib's headers.

For CPU, or with all CUDA kernels (``--cuda 12`` or ``13``), for which an nvcc of that major version must be
found: on PATH, in CUDA_HOME's place, or from the wheels nvidia-cuda-nvcc. CUDA wheels carry a local version,
such as 0.1.0+cuda13, so that they are told apart; install them beside jax[cuda13].
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Builds one wheel and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", choices=("12", "13"), help="major version; default: CPU only")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    defines = {"MAGI_JAX_CUDA": "OFF"}
    if args.cuda:
        _check_nvcc(args.cuda)
        defines = {"MAGI_JAX_CUDA": "ON", "MAGI_JAX_CUDA_KERNELS": "all"}
    settings = [f"--config-settings=cmake.define.{name}={v}" for name, v in defines.items()]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(args.out)]
    before = set(args.out.glob("*.whl"))
    subprocess.run([*command, "--quiet", *settings, str(ROOT)], check=True)
    wheels = sorted(args.out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    wheel = wheels[-1]
    if args.cuda:
        wheel = _with_local_version(wheel, f"cuda{args.cuda}")
    print(wheel if wheel not in before else f"{wheel} (replaced)")


def _check_nvcc(major: str) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        sys.exit(f"error: no nvcc was found; install the CUDA {major} toolkit and put it on PATH.")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.", text)
    if found is None or found[1] != major:
        release = found[0].strip(".") if found else "of an unknown version"
        sys.exit(f"error: {nvcc} is {release}, but --cuda {major} was asked for.")


def _with_local_version(wheel: Path, local: str) -> Path:
    """Renames a wheel and its metadata: ``0.1.0`` becomes ``0.1.0+local``."""
    name, version, *tags = wheel.stem.split("-")
    folder = wheel.parent / "unpacked"
    subprocess.run([sys.executable, "-m", "wheel", "unpack", "-d", str(folder), wheel], check=True)
    (tree,) = folder.iterdir()
    info = tree / f"{name}-{version}.dist-info"
    text = (info / "METADATA").read_text()
    text = text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+{local}\n", 1)
    (info / "METADATA").write_text(text)
    info.rename(tree / f"{name}-{version}+{local}.dist-info")
    subprocess.run(
        [sys.executable, "-m", "wheel", "pack", "-d", str(wheel.parent), str(tree)], check=True
    )
    shutil.rmtree(folder)
    wheel.unlink()
    return wheel.with_name("-".join([name, f"{version}+{local}", *tags]) + ".whl")


if __name__ == "__main__":
    main()
