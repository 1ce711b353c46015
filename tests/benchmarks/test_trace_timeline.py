"""The table of kernels is what a profiler's trace says."""

import gzip
import json

import pytest
import timeline


def named(pid, tid, process, thread):
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}},
    ]


EVENTS = [
    *named(1, 7, "/device:GPU:0", "Stream #24(Compute,Memset)"),
    *named(1, 9, "/device:GPU:0", "Stream #108(Compute)"),
    *named(2, 7, "/device:GPU:1", "Stream #42(Compute)"),
    *named(1, 8, "/device:GPU:0", "XLA Ops"),
    *named(3, 7, "/host:CPU", "Stream #1(python)"),
    {"ph": "X", "pid": 1, "tid": 7, "ts": 120.0, "dur": 30.0, "name": "void a::b<c::D>(a::P)"},
    {"ph": "X", "pid": 1, "tid": 9, "ts": 110.0, "dur": 50.0, "name": "n::(anonymous namespace)::K(n::M)"},
    {"ph": "X", "pid": 2, "tid": 7, "ts": 100.0, "dur": 5.0, "name": "loop_fusion"},
    {"ph": "X", "pid": 1, "tid": 8, "ts": 0.0, "dur": 5.0, "name": "an XLA operation"},
    {"ph": "X", "pid": 3, "tid": 7, "ts": 0.0, "dur": 5.0, "name": "on the host"},
]  # fmt: skip


def test_kernels_by_gpu_and_stream():
    found = timeline.find(EVENTS)
    assert [kernel[:3] for kernel in found] == [
        ("1", "42", "loop_fusion"), ("0", "108", "K"), ("0", "24", "b"),
    ]  # fmt: skip
    times = [time for kernel in found for time in kernel[3:]]
    assert times == pytest.approx([0.0, 0.005, 0.01, 0.06, 0.02, 0.05])


def test_a_folder_has_a_trace_of_gpus_or_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .*trace"):
        timeline.read(tmp_path)
    for name, events in (("a", EVENTS[-1:]), ("b", EVENTS)):
        with gzip.open(tmp_path / f"{name}.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)
        if name == "a":
            with pytest.raises(ValueError, match="no kernel of a GPU"):
                timeline.read(tmp_path)
    assert len(timeline.read(tmp_path)) == 3
