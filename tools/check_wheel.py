"""Installs the newest wheel of dist/ into an empty environment and runs attention there.

The program below runs outside of the repository, so that only what the wheel holds can be imported.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import jax, numpy as np, magi_jax as mj
info = mj.build_info()
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


def main() -> None:
    """Makes the environment, installs the wheel and runs the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="default: the newest of dist/")
    parser.add_argument("--jax", default="jax", help='requirement of jax, such as "jax[cuda13]"')
    args = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if args.wheel is None and not wheels:
        sys.exit("error: there is no wheel in dist/; run make build first.")
    wheel = (args.wheel or wheels[-1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
        python = f"{folder}/venv/bin/python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, str(wheel), args.jax], check=True)
        subprocess.run([python, "-c", PROGRAM], check=True, cwd=folder)
    print(f"{wheel.name} works in an empty environment")


if __name__ == "__main__":
    main()
