"""A job of several processes that never outlives its test."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

WORKER = Path(__file__).resolve().parent / "worker.py"


class Ended(NamedTuple):
    """How a process ended; the status is negative for a signal."""

    status: int
    output: str


class Job:
    """Processes of `worker.py` that know each other; all of them are killed on leaving the block.

    with Job(2, tmp_path, ["--steps", "4"]) as job:
        job.wait_for("step 2", timeout=120)
        job.kill(1)
        ended = job.wait(timeout=60)
    """

    def __init__(self, count: int, folder: Path, arguments: list[str], own=None):
        """Describes a job.

        Args:
            count: number of processes.
            folder: where the output goes, and what the processes run in.
            arguments: of every process.
            own: further arguments of single processes, by number.
        """
        self.count, self.folder, self.arguments, self.own = count, folder, arguments, own or {}
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Job":
        # Processes set what they need themselves.
        kept = {n: v for n, v in os.environ.items() if n not in ("XLA_FLAGS", "PJRT_NPROC")}
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        for i in range(self.count):
            command = [sys.executable, str(WORKER), "--process", str(i)]
            command += ["--processes", str(self.count), "--coordinator", f"localhost:{port}"]
            with self._log(i).open("w") as log:
                process = subprocess.Popen(
                    [*command, *self.arguments, *self.own.get(i, [])],
                    cwd=self.folder,
                    env=kept,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.processes.append(process)
        return self

    def __exit__(self, *_) -> None:
        for i, process in enumerate(self.processes):
            self.kill(i)
            process.wait()

    def _log(self, process: int) -> Path:
        return self.folder / f"process_{process}.log"

    def output(self, process: int) -> str:
        """What a process has printed so far."""
        return self._log(process).read_text()

    def wait_for(self, text: str, timeout: float) -> None:
        """Waits until process 0 prints ``text``.

        Raises:
            AssertionError: it ended before, or the time is over.
        """
        until = time.monotonic() + timeout
        while text not in self.output(0):
            ended = self.processes[0].poll() is not None
            if ended or time.monotonic() > until:
                raise AssertionError(f"no {text!r} from process 0 ({ended=}):\n{self.output(0)}")
            time.sleep(0.05)

    def kill(self, process: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a process and all that it started."""
        try:
            os.killpg(self.processes[process].pid, number)
        except ProcessLookupError:
            return

    def wait(self, timeout: float, among: list[int] | None = None) -> list[Ended]:
        """Waits until all processes (or those named) have ended.

        Raises:
            AssertionError: one of them has not, in all that time.
        """
        until = time.monotonic() + timeout
        ended = []
        for i in range(self.count) if among is None else among:
            try:
                status = self.processes[i].wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"process {i} still runs after {timeout} s:\n{self.output(i)}"
                ) from None
            ended.append(Ended(status, self.output(i)))
        return ended

    def orphans(self) -> list[int]:
        """Processes whose group still has a member."""
        left = []
        for i, process in enumerate(self.processes):
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                continue
            left.append(i)
        return left
