"""The native group collectives with one process per GPU, through `jax.distributed`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from magi_jax.comm.nvshmem import find_library

WORKER = Path(__file__).with_name("group_worker.py")
TRANSFERS = WORKER.parent.parent / "comm"
COUNT = 2
PLACEMENTS = ["staged"] if find_library() is None else ["staged", "nvshmem"]


def run_processes(scenario: str, placement: str = "staged") -> list[tuple[int, str]]:
    """Return code and output of every process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    path = os.pathsep.join([str(TRANSFERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"SEED": str(seed), "PYTHONPATH": path}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, placement, *map(str, (process, COUNT, port))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for process in range(COUNT)
    ]
    try:
        outputs = [worker.communicate(timeout=150)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, out) for worker, out in zip(workers, outputs, strict=True)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("scenario", ["conformance", "plans", "thousand"])
def test_processes(scenario, placement):
    for code, output in run_processes(scenario, placement):
        assert code == 0, output
        assert "passed" in output


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_killed_process_ends_the_others_with_an_error(placement):
    *others, (gone, _) = run_processes("killed", placement)
    assert gone == 9
    for code, output in others:
        assert code == 0, output
        assert "gave up in call" in output
