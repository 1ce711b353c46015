"""Sets up devices for all tests. JAX and NumPy read the variables when they start."""

import virtual_devices

virtual_devices.prepare()

import numpy as np  # noqa: E402
import pytest  # noqa: E402

# Modules that tests of several folders share: said here, before the first of them is imported.
pytest.register_assert_rewrite(
    "ops_problem", "test_attention_conformance", "device_cases", "group_problem", "feature_check"
)


@pytest.fixture
def rng():
    """A fresh generator; its seed is printed, so that a failure can be repeated."""
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)
