import numpy as np
import pytest


@pytest.fixture
def rng():
    """A fresh generator; its seed is printed, so that a failure can be repeated."""
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)
