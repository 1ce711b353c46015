"""Features of attention in combination: every pair of levels meets in some case, against float64.

docs/features.md lists which case shows what; tools/feature_table.py writes it.
"""

import one_device
import pytest
import several_devices
from feature_check import check
from feature_pairs import distributed_cases, one_device_cases

DIMS = {"equal": (16, 16), "of values smaller": (24, 8)}


@pytest.mark.parametrize("number", range(len(one_device_cases())))
def test_one_device(number, rng):
    case = one_device_cases()[number]
    check(case, *one_device.run(case, rng, DIMS))


@pytest.mark.parametrize("number", range(len(distributed_cases())))
def test_distributed(number, rng):
    case = distributed_cases()[number]
    check(case, *several_devices.run(case, rng, DIMS))
