"""Starts `group_worker.py` in several processes that make one program."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

WORKER = Path(__file__).with_name("group_worker.py")
TRANSFERS = WORKER.parent.parent / "comm"


def run_processes(
    scenario: str, placement: str = "staged", *, count: int, gpus: int, flags: str = ""
) -> list[tuple[int, str]]:
    """Return code and output of every process.

    Args:
        scenario: which of the worker's.
        placement: of operands, as `symmetric_memory` takes it.
        count: processes, one rank each.
        gpus: of the host; with fewer than processes several ranks share one.
        flags: for XLA, beside those that are set already.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    path = os.pathsep.join([str(TRANSFERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"SEED": str(seed), "PYTHONPATH": path}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, placement]
            + [str(n) for n in (process, count, port, gpus)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for process in range(count)
    ]
    try:
        outputs = [worker.communicate(timeout=150)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, out) for worker, out in zip(workers, outputs, strict=True)]


def check_processes(scenario: str, placement: str = "staged", **options) -> None:
    """Each of them passes."""
    for code, output in run_processes(scenario, placement, **options):
        assert code == 0, output
        assert "passed" in output


def check_killed(placement: str = "staged", **options) -> None:
    """When one is killed the others end with an error of their own."""
    *others, (gone, _) = run_processes("killed", placement, **options)
    assert gone == 9
    for code, output in others:
        assert code == 0, output
        assert "gave up in call" in output
