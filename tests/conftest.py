"""Sets up devices for all tests. JAX reads these variables when it starts, so they are set on import."""

import os

import numpy as np
import pytest

NUM_DEVICES = 8

flag = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
if flag not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
# With fewer threads than this, virtual CPU devices that wait for each other can starve.
os.environ.setdefault("PJRT_NPROC", "16")


@pytest.fixture
def rng():
    """A fresh generator; its seed is printed, so that a failure can be repeated."""
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)
