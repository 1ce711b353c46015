"""The script for a whole node, with programs in the place of Python that note what they are asked for."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTES = '#!/bin/sh\necho "ran $*"\n'


@pytest.fixture
def on_node(tmp_path):
    def call(*parts: str, python: str = NOTES) -> tuple[int, str]:
        for name, text in (
            ("nvidia-smi", "#!/bin/sh\necho a\necho b\necho c\n"),
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
        *(f"benchmarks/{name}.py" for name in ("collectives", "distributed", "rivals")),
    ]
    for script in ("collectives", "distributed"):
        ranks = [line.split()[-1] for line in lines if script in line and "--coordinator" in line]
        assert sorted(ranks) == ["0", "1", "2"]
    assert all("--commit abc" in line for line in lines if "benchmarks/" in line)


def test_what_fails_is_named_and_keeps_nothing_from_running(on_node):
    code, output = on_node(python='#!/bin/sh\necho "ran $*"\nexit 7\n')
    assert code == 1
    assert "failed with 7: benchmarks/rivals.py" in output
    assert output.splitlines()[-1].split()[1:4] == [
        "tests",
        "collectives.py",
        "collectives.py:processes",
    ]


def test_parts_are_chosen(on_node):
    code, output = on_node("rivals", "nothing")
    assert code == 1
    assert output.endswith("failed: nothing\n")
    assert output.count("ran ") == 1
