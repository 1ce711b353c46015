"""These tests need an NVIDIA GPU. On a machine without one the folder is not collected at all, so that a
run there reports what it ran and nothing that it did not.
"""

import sys
from pathlib import Path

import virtual_devices

# Conformance suites are shared with the other implementations, random transfers with theirs.
SHARED = ("ops", "comm", "features")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / room) for room in SHARED]

# Group collectives take two devices.
LEFT_OUT = ["test_*.py"], ["test_native_collectives*.py"], []
collect_ignore_glob = LEFT_OUT[min(virtual_devices.cuda_devices(), 2)]
