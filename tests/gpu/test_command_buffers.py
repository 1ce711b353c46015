"""Attention recorded into command buffers gives the bits of plain launches, whatever buffers calls get."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from device_cases import PATHS

from magi_jax.ops import cuda

WORKER = Path(__file__).with_name("command_buffer_worker.py")
# Kernels whose sums have a fixed order: there bits can be compared.
NAMES = [path.name for path in PATHS if path.is_deterministic]
NAMES += ["documents"] if cuda.SM90 in PATHS else []
ALWAYS = " --xla_gpu_graph_min_graph_size=1"
RECORDED = {
    "by default": "",
    "custom calls": "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL" + ALWAYS,
    "loops too": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL,WHILE" + ALWAYS,
}


def digests(flags: str) -> str:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    environment = dict(os.environ, XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    done = subprocess.run(
        [sys.executable, str(WORKER), *NAMES],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def launched():
    return digests("--xla_gpu_enable_command_buffer=")


@pytest.mark.parametrize("flags", RECORDED)
def test_bits_are_those_of_plain_launches(launched, flags):
    assert launched
    assert digests(RECORDED[flags]) == launched
