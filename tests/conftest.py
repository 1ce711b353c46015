"""Sets up devices for all tests. JAX and NumPy read the variables when they start."""

import virtual_devices

virtual_devices.prepare()

import numpy as np  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture
def rng():
    """A fresh generator; its seed is printed, so that a failure can be repeated."""
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)
