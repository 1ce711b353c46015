"""Ranks that are processes of their own and share one GPU, which they have in turns: all of the native
transport but links between GPUs and what runs at the same time.
"""

import pytest
from group_processes import check_killed, check_processes

# What can be recorded into command buffers is: attention, between calls of the transport that cannot.
RECORDED = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL,WHILE"
    " --xla_gpu_graph_min_graph_size=1"
)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_conformance(count):
    check_processes("conformance", count=count, gpus=1)


@pytest.mark.parametrize("scenario", ["failing", "plans", "thousand"])
def test_tables(scenario):
    check_processes(scenario, count=2, gpus=1)


@pytest.mark.parametrize(
    ("count", "flags"),
    [(2, ""), (2, RECORDED), (4, "")],
    ids=["launched", "recorded", "four ranks"],
)
def test_attention_and_its_gradients(count, flags):
    check_processes("attention", count=count, gpus=1, flags=flags)


def test_a_killed_process_ends_the_others_with_an_error():
    check_killed(gpus=1, count=3)
