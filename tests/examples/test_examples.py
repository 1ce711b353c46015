"""The examples run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def _run(arguments, folder):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    command = [sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", ["single_device.py", "custom_mask.py"])
def test_small_examples(name, tmp_path):
    assert _run([name], tmp_path)


def test_demo_agrees_with_dense_attention_and_learns(tmp_path):
    sizes = ["--steps", "6", "--seq-len", "512", "--layers", "2", "--features", "64"]
    output = _run(["train_lm.py", *sizes], tmp_path)
    assert "largest relative difference" in output
    assert "compiled 1 time(s) for 6 batches" in output
    losses = [
        float(line.split("loss ")[1].split()[0])
        for line in output.splitlines()
        if "  step " in line or "] step " in line
    ]
    assert losses[-1] < losses[0]
    for picture in ("loss.png", "plan_full_causal.png", "plan_sliding_window.png"):
        assert (tmp_path / "outputs" / picture).stat().st_size > 0
