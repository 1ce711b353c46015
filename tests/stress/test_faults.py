"""A process of a job is killed in the middle of training; the short form of `long_faults.py`."""

import re
import shutil

import pytest
from job import Job

# What a survivor says: the heartbeat was missed, or the connection broke before.
NAMED = r"Task 1 heartbeat timeout|stopped sending heartbeats\):\s+1\b|[Cc]onnection (closed|reset) by peer"
# Only so that a hang ends: twenty times the heartbeat, for machines that are busy.
PATIENCE = 300


def losses(output: str) -> dict[int, float]:
    """Loss of each step that a process printed."""
    return {int(n): float(x) for n, x in re.findall(r"step (\d+) loss ([\d.]+)", output)}


def undisturbed(folder, steps: int, devices: int = 4) -> dict[int, float]:
    """Losses of one process that nothing happens to."""
    with Job(1, folder, ["--steps", str(steps), "--devices", str(devices)]) as job:
        (ended,) = job.wait(PATIENCE)
    assert ended.status == 0, ended.output
    return losses(ended.output)


def test_a_killed_process_stops_the_others_and_another_mesh_resumes(tmp_path):
    arguments = ["--checkpoint", "weights.npz", "--steps", "2000"]
    with Job(2, tmp_path, arguments) as job:
        job.wait_for("step 3 ", PATIENCE)
        job.kill(1)
        survivor, killed = job.wait(PATIENCE)
        assert job.orphans() == []
    assert survivor.status != 0
    assert killed.status == -9
    assert re.search(NAMED, survivor.output), survivor.output

    shutil.copy(tmp_path / "weights.npz", tmp_path / "kept.npz")
    reached = max(losses(survivor.output))
    expected = undisturbed(tmp_path, reached + 3)
    for step, loss in losses(survivor.output).items():
        assert loss == pytest.approx(expected[step], rel=1e-5)
    arguments = ["--checkpoint", "kept.npz", "--steps", str(reached + 3), "--devices", "3"]
    with Job(1, tmp_path, arguments) as job:
        (ended,) = job.wait(PATIENCE)
    assert ended.status == 0, ended.output
    resumed = losses(ended.output)
    assert max(resumed) == reached + 3
    assert min(resumed) in (reached, reached + 1), "the last step may not have been saved any more"
    for step, loss in resumed.items():
        assert loss == pytest.approx(expected[step], rel=1e-5)
