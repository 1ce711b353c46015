"""Features of attention in combination on the device: the cases of tests/features, on all GPUs."""

import distributed
import one_device
import pytest
from feature_check import check
from feature_pairs import distributed_cases, on_a_gpu, one_device_cases

from magi_jax.ops import cuda

DIMS = {"equal": (128, 128), "of values smaller": (192, 128)}


def on_this_gpu(case):
    """The case with kernels that the device has."""
    case = on_a_gpu(case)
    refused = cuda.refusal(case["implementation"], cuda.device_capability())
    return case | {"implementation": "sm80"} if refused else case


@pytest.mark.parametrize("number", range(len(one_device_cases())))
def test_one_device(number, rng):
    case = on_this_gpu(one_device_cases()[number])
    check(case, *one_device.run(case, rng, DIMS))


@pytest.mark.parametrize("number", range(len(distributed_cases())))
def test_distributed(number, rng):
    case = on_this_gpu(distributed_cases()[number])
    check(case, *distributed.run(case, rng, DIMS))
