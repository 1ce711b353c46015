"""Installs the newest wheel of dist/ into an empty environment and runs attention there.

The program below runs outside of the repository, so that only what the wheel holds can be imported.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import sys, jax, numpy as np, magi_jax as mj
info = mj.build_info()
assert str(info["cuda"] and info["cuda_version"].split(".")[0]) == sys.argv[1], info
mask = mj.masks.varlen([30, 1, 69], causal=True, window=(20, 0))
q, k, v = (jax.random.normal(key, (100, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
out = jax.jit(mj.flex_flash_attention)(q, k, v, mj.slice_table(mask))
dense = jax.nn.dot_product_attention(q, k, v, mask=mask.dense()[None, None])
np.testing.assert_allclose(out, dense, atol=1e-5)
mesh = jax.make_mesh((1,), ("cp",))
plan = mj.make_plan(mask, 1)
with jax.set_mesh(mesh):
    moved = mj.dispatch(tuple(map(np.asarray, (q, k, v))), plan)
    moved = jax.device_put(moved, jax.NamedSharding(mesh, jax.P("cp")))
    again = mj.undispatch(np.asarray(mj.dist_attention(*moved, plan)), plan)
np.testing.assert_allclose(again, dense, atol=1e-5)
print(mj.__file__)
print(f"attention agrees with dense attention; {info}")
"""


# What every Linux machine has; CUDA's runtime is linked in, and its driver is opened when it is needed.
SYSTEM_LIBRARIES = re.compile(r"(ld-linux-.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+))\.so\.\d+")


def main() -> None:
    """Looks into the wheel, makes the environment, installs the wheel and runs the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="default: the newest of dist/")
    parser.add_argument("--jax", default="jax", help='requirement of jax, such as "jax[cuda13]"')
    args = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if args.wheel is None and not wheels:
        sys.exit("error: there is no wheel in dist/; run make build first.")
    wheel = (args.wheel or wheels[-1]).absolute()
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
        python = f"{folder}/venv/bin/python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, str(wheel), args.jax], check=True)
        cuda = re.search(r"\+cuda(\d+)", wheel.name)
        expected = cuda[1] if cuda else "False"
        subprocess.run([python, "-c", PROGRAM, expected], check=True, cwd=folder)
    print(f"{wheel.name} works in an empty environment")


def check_contents(wheel: Path) -> None:
    """The two compiled modules and no other library, which need nothing but the system's."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).suffixes]
        if sorted(Path(name).name.split(".")[0] for name in libraries) != ["_ffi", "_planner"]:
            sys.exit(f"error: {wheel.name} should hold _ffi and _planner, it holds {libraries}")
        for name in libraries:
            path = archive.extract(name, folder)
            command = ["readelf", "--dynamic", "--wide", path]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
            others = [library for library in needed if not SYSTEM_LIBRARIES.fullmatch(library)]
            if others or re.search(r"\((RPATH|RUNPATH)\)", text):
                sys.exit(f"error: {name} needs {others} or has a search path of its own:\n{text}")
            size = archive.getinfo(name).file_size
            print(f"{name}: {size / 1e6:.1f} MB, needs {', '.join(needed)}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
