"""The script for a whole node, with programs in the place of Python that note what they are asked for."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTES = '#!/bin/sh\necho "ran $*"\n'


@pytest.fixture
def on_node(tmp_path):
    def call(*parts: str, python: str = NOTES, passing_s: int = 0) -> tuple[int, str]:
        """Of a machine with three GPUs, each look at whose clock finds that so many seconds have passed."""
        clock = tmp_path / "clock"
        clock.write_text("0")
        tick = f"now=$(($(cat {clock}) + {passing_s}))\necho $now > {clock}\necho $now\n"
        for name, text in (
            ("nvidia-smi", "#!/bin/sh\necho a\necho b\necho c\n"),
            ("date", f"#!/bin/sh\n{tick}"),
            ("python3", python),
        ):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        ran = subprocess.run(
            ["sh", "benchmarks/on_node.sh", str(tmp_path / "found"), "abc", "short", *parts],
            env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.returncode, ran.stdout

    return call


def test_all_parts_run_in_both_layouts(on_node):
    code, output = on_node()
    assert code == 0
    assert output.endswith("all parts ran\n")
    lines = [line for line in output.splitlines() if line.startswith("ran ")]
    alone = [line for line in lines if "--coordinator" not in line]
    assert [line.split()[1] for line in alone] == [
        "-m",
        *(
            f"benchmarks/{name}.py"
            for name in ("distributed", "distributed", "collectives", "rivals")
        ),
    ]
    for script in ("collectives", "distributed"):
        ranks = [line.split()[-1] for line in lines if script in line and "--coordinator" in line]
        assert sorted(ranks) == ["0", "1", "2"]
    assert all("--commit abc" in line for line in lines if "benchmarks/" in line)


def test_what_fails_is_named_and_keeps_nothing_from_running(on_node):
    code, output = on_node(python='#!/bin/sh\necho "ran $*"\nexit 7\n')
    assert code == 1
    assert "failed with 7: benchmarks/rivals.py" in output
    assert output.splitlines()[-1] == (
        "failed: tests distributed.py distributed.py collectives.py collectives.py:processes"
        " distributed.py:processes rivals.py"
    )


def test_parts_are_chosen(on_node):
    code, output = on_node("rivals", "nothing")
    assert code == 1
    assert output.endswith("failed: nothing\n")
    assert output.count("ran ") == 1


def test_what_there_is_no_time_for_is_named_and_not_begun(on_node):
    code, output = on_node("tests", "attention", "mha", "rivals", passing_s=80)
    assert code == 1
    assert "ran -m pytest" in output
    assert output.count("ran benchmarks/distributed.py") == 2
    assert "ran benchmarks/rivals.py" not in output
    assert "no time left for: benchmarks/rivals.py" in output
    assert output.endswith("failed: rivals.py\n")
