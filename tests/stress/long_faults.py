"""Further faults of jobs of several processes; `make stress` runs this file."""

import re
import signal

import pytest
from job import Job
from test_faults import NAMED, PATIENCE, losses, undisturbed


@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "other"])
def test_a_frozen_process_stops_the_others(victim, tmp_path):
    with Job(2, tmp_path, ["--steps", "2000"]) as job:
        job.wait_for("step 2 ", PATIENCE)
        job.kill(victim, signal.SIGSTOP)
        (survivor,) = job.wait(PATIENCE, [1 - victim])
    assert survivor.status != 0
    # Without the coordinator itself the others lose their connection to it.
    named = NAMED if victim == 1 else r"Heartbeat|heartbeat"
    assert re.search(named, survivor.output), survivor.output


def test_a_killed_coordinator_stops_the_others(tmp_path):
    with Job(2, tmp_path, ["--steps", "2000"]) as job:
        job.wait_for("step 2 ", PATIENCE)
        job.kill(0)
        killed, survivor = job.wait(PATIENCE)
        assert job.orphans() == []
    assert killed.status == -9
    assert survivor.status != 0
    assert re.search(r"[Hh]eartbeat|[Cc]onnection|PollForError", survivor.output), survivor.output


def test_a_slow_process_is_waited_for(tmp_path):
    """Twice as long as the heartbeat may be missing: it still beats."""
    slow = {1: ["--sleep-at", "2", "--sleep", "30"]}
    with Job(2, tmp_path, ["--steps", "3"], slow) as job:
        ended = job.wait(PATIENCE)
    assert [e.status for e in ended] == [0, 0], ended
    assert losses(ended[0].output) == losses(ended[1].output)
    expected = undisturbed(tmp_path, 3)
    for step, loss in losses(ended[0].output).items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (["--other-plan-at", "2"], r"ValueError: processes planned differently.*1: \('"),
        (["--other-version"], r"ValueError: processes planned differently.*'0\.0\.0\+other'"),
    ],
    ids=["plan", "version"],
)
def test_a_process_that_differs_is_named_on_all(fault, named, tmp_path):
    with Job(2, tmp_path, ["--steps", "4"], {1: fault}) as job:
        ended = job.wait(PATIENCE)
        assert job.orphans() == []
    for status, output in ended:
        assert status != 0
        assert re.search(named, output), output


def test_a_process_that_never_comes_is_named(tmp_path):
    """The job is one of three; the third process is not started."""
    with Job(2, tmp_path, ["--processes", "3", "--initialization", "15"]) as job:
        ended = job.wait(PATIENCE)
    for status, output in ended:
        assert status != 0
        assert re.search(r"[Tt]imed out|timeout|DEADLINE_EXCEEDED", output), output
