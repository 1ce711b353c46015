"""These tests need an NVIDIA GPU. On a machine without one the folder is not collected at all, so that a
run there reports what it ran and nothing that it did not.
"""

import ctypes
import sys
from pathlib import Path

import pytest

# The conformance suite is shared with the other implementations.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ops"))
pytest.register_assert_rewrite("ops_problem", "test_attention_conformance", "device_cases")


def _has_cuda_device() -> bool:
    """Asks the driver itself: initialising JAX here would fix its platform for the other tests."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return found and count.value > 0


collect_ignore_glob = [] if _has_cuda_device() else ["test_*.py"]
