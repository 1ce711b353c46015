"""The native group collectives with one process per GPU, through `jax.distributed`."""

import pytest
import virtual_devices
from group_processes import check_killed, check_processes

from magi_jax.comm.nvshmem import find_library

GPUS = {"count": virtual_devices.cuda_devices(), "gpus": virtual_devices.cuda_devices()}
PLACEMENTS = ["staged"] if find_library() is None else ["staged", "nvshmem"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("scenario", ["conformance", "plans", "thousand", "attention"])
def test_processes(scenario, placement):
    check_processes(scenario, placement, **GPUS)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_killed_process_ends_the_others_with_an_error(placement):
    check_killed(placement, **GPUS)


def test_a_program_that_fails_with_a_call_under_way():
    check_processes("failing", **GPUS)
