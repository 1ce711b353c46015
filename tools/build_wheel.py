"""Builds a wheel into dist/ in an isolated environment, with the oldest supported jaxlib's headers.

For CPU, or with all CUDA kernels (``--cuda 12`` or ``13``), for which an nvcc of that major version must be
found: on PATH, in CUDA_HOME's place, or from the wheels nvidia-cuda-nvcc. CUDA wheels carry a local version,
such as 0.1.0+cuda13, so that they are told apart; install them beside jax[cuda13].
"""

import argparse
import base64
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Builds one wheel and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", choices=("12", "13"), help="major version; default: CPU only")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--no-isolation",
        action="store_true",
        help="build with the packages that are installed here",
    )
    args = parser.parse_args()
    defines = {"MAGI_JAX_CUDA": "OFF"}
    if args.cuda:
        _check_nvcc(args.cuda)
        defines = {"MAGI_JAX_CUDA": "ON", "MAGI_JAX_CUDA_KERNELS": "all"}
    settings = [f"--config-settings=cmake.define.{name}={v}" for name, v in defines.items()]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(args.out)]
    if args.no_isolation:
        command.append("--no-build-isolation")
    subprocess.run([*command, "--quiet", *settings, str(ROOT)], check=True)
    wheel = max(args.out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if args.cuda:
        wheel = with_local_version(wheel, f"cuda{args.cuda}")
    print(wheel)


def _check_nvcc(major: str) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        sys.exit(f"error: no nvcc was found; install the CUDA {major} toolkit and put it on PATH.")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.", text)
    if found is None or found[1] != major:
        release = found[0].strip(".") if found else "of an unknown version"
        sys.exit(f"error: {nvcc} is {release}, but --cuda {major} was asked for.")


def with_local_version(wheel: Path, local: str) -> Path:
    """Renames a wheel and what it says of itself: version ``0.1.0`` becomes ``0.1.0+local``."""
    name, version, *tags = wheel.stem.split("-")
    old, new = f"{name}-{version}.dist-info", f"{name}-{version}+{local}.dist-info"
    out = wheel.with_name("-".join([name, f"{version}+{local}", *tags]) + ".whl")
    records = []
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            data, path = source.read(entry), entry.filename.replace(old, new, 1)
            if path == f"{new}/RECORD":
                continue
            if path == f"{new}/METADATA":
                line = f"\nVersion: {version}\n".encode()
                data = data.replace(line, f"\nVersion: {version}+{local}\n".encode(), 1)
            entry.filename = path
            target.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            records.append(f"{path},sha256={digest},{len(data)}\n")
        target.writestr(f"{new}/RECORD", "".join([*records, f"{new}/RECORD,,\n"]))
    wheel.unlink()
    return out


if __name__ == "__main__":
    main()
