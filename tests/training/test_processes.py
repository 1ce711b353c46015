"""A job of two processes: plans agree, shards come together, and a checkpoint fits another mesh."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import own_sequences
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax.data import check_same_plans, place
from magi_jax.testing import oracle

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = ["--seq-len", "256", "--layers", "1", "--features", "16", "--head-dim", "8"]
SIZES += ["--window", "64", "--steps", "4", "--save-every", "2", "--checkpoints", "checkpoints"]


def _start(arguments, folder):
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    # Compiling takes most of the time of so short a job.
    environment["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    command = [sys.executable, str(ROOT / "examples" / "multi_host.py"), *arguments, *SIZES]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True
    )


def _losses(processes):
    """Loss of each step, from what process 0 prints; all processes must end well."""
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    assert not any("step" in output for output in outputs[1:])
    return {int(s): float(x) for s, x in re.findall(r"step (\d+)  loss ([\d.]+)", outputs[0])}


def test_two_processes_train_and_another_mesh_resumes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = ["--processes", "2", "--devices", "4", "--cp", "8", "--coordinator", f"localhost:{port}"]
    together = _losses([_start([*job, "--process", str(i)], tmp_path) for i in range(2)])
    assert sorted(together) == [1, 2, 3, 4]

    (tmp_path / "checkpoints" / "4").rename(tmp_path / "after_4")
    resumed = _losses([_start(["--cp", "2", "--dp", "2"], tmp_path)])
    assert sorted(resumed) == [3, 4]
    for step, loss in resumed.items():
        assert loss == pytest.approx(together[step], rel=2e-5)
        assert loss != pytest.approx(together[step - 1], rel=2e-3)


def test_processes_that_read_sequences_of_their_own(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    count = len(own_sequences.LENGTHS)
    command = [sys.executable, own_sequences.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(count), coordinator],
            cwd=tmp_path, env={**os.environ, "XLA_FLAGS": ""}, stdout=-1, stderr=-2, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    for i, process in enumerate(processes):
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        batch = own_sequences.batch_of(i)
        x = own_sequences.embeddings()[batch.tokens[0]]
        mask = mj.masks.from_segment_ids(batch.segment_ids[0], causal=True)
        expected, _ = oracle.attention(x, x, x, mask.dense())
        np.testing.assert_allclose(np.load(tmp_path / f"{i}.npy")[0], expected, atol=1e-5)


def test_processes_that_planned_differently_are_named(monkeypatch):
    plan = mj.make_plan(mj.masks.causal(64), 2)
    gathered = []
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: gathered.append(x) or x)
    assert check_same_plans([plan]) == plan.fingerprint()
    assert check_same_plans([plan, plan]) != plan.fingerprint()
    assert gathered[0].shape == gathered[1].shape, "processes with other plans must still meet"

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    mine = gathered[0]
    everyone = np.stack([mine, mine, mine])
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda _: everyone)
    assert check_same_plans([plan]) == plan.fingerprint()
    everyone[2, 0] += 1
    other = everyone[2, :16].tobytes().hex()
    with pytest.raises(
        ValueError, match=rf"planned differently.*2: \('{other}', '{mj.__version__}'"
    ):
        check_same_plans([plan])
    everyone[2], everyone[1, 16:22] = mine, np.frombuffer(b"9.9.9\0", np.uint8)
    with pytest.raises(ValueError, match=r"1: \('[0-9a-f]{32}', '9.9.9"):
        check_same_plans([plan])


def test_place_shards_whole_arrays():
    mesh = jax.make_mesh((2, 4), ("dp", "cp"))
    sharding = NamedSharding(mesh, P("dp", "cp"))
    tree = {"x": np.arange(64).reshape(4, 16), "y": np.ones((2, 8, 3))}
    placed = place(tree, sharding)
    for name, x in placed.items():
        assert x.sharding == sharding
        np.testing.assert_array_equal(x, tree[name])
