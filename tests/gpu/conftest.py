"""These tests need an NVIDIA GPU. On a machine without one the folder is not collected at all, so that a
run there reports what it ran and nothing that it did not.
"""

import ctypes
import sys
from pathlib import Path

# Conformance suites are shared with the other implementations, random transfers with theirs.
SHARED = ("ops", "comm", "features")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / room) for room in SHARED]


def _cuda_devices() -> int:
    """Asks the driver itself: initialising JAX here would fix its platform for the other tests."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


# Group collectives take two devices.
collect_ignore_glob = [["test_*.py"], ["test_native_collectives*.py"], []][min(_cuda_devices(), 2)]
