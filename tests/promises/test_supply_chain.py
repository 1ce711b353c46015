"""What a build may bring in is pinned, and a run opens no connection, starts no program, writes no file."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# Python tells of these before it does them, in whatever library.
PROGRAM = """
import os, sys

FORBIDDEN = ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request",
             "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "tempfile.mkstemp",
             "tempfile.mkdtemp", "shutil.rmtree", "os.remove", "os.rename", "os.mkdir")
seen = []

def watch(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (
        os.O_WRONLY | os.O_RDWR | os.O_CREAT) and arguments[0] != os.devnull
    if event in FORBIDDEN or writes:
        seen.append((event, repr(arguments)))

import jax, jax.numpy as jnp, numpy
sys.addaudithook(watch)
import magi_jax as mj
import magi_jax.data, magi_jax.testing

mask = mj.masks.varlen([40, 60, 28], causal=True)
plan = mj.make_plan(mask, 2, mj.PlanConfig(chunk_size=16))
plan.report(), plan.fingerprint()
mesh = jax.make_mesh((2,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
x = mj.dispatch(numpy.ones((128, 2, 8), numpy.float32), plan)
jax.jit(jax.grad(lambda x: mj.dist_attention(x, x, x, plan, mesh=mesh).sum()))(x)
mj.flex_flash_attention(x, x, x, mj.masks.causal(len(x)))
print("SEEN", seen)
"""


def test_a_run_stays_by_itself(tmp_path):
    command = [sys.executable, "-B", "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SEEN []" in done.stdout, done.stdout
    assert not list(tmp_path.iterdir())


def test_build_requirements_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirement in project["build-system"]["requires"]:
        assert re.fullmatch(r"[\w\-]+==[\d.]+", requirement), requirement


def test_no_source_uses_shared_places():
    """Files in places that other users of the machine can write to can be put there by them."""
    sources = [p for f in ("magi_jax", "xla_ffi") for p in (ROOT / f).rglob("*")]
    for path in sources:
        if path.suffix not in (".py", ".cc", ".h", ".cu", ".cuh"):
            continue
        found = re.search(
            r"[\"'](/tmp|/dev/shm|/var/tmp)|\b(mktemp|tmpnam|shm_open)\b", path.read_text()
        )
        assert not found, f"{path}: {found and found[0]}"
