"""Sets up devices for all tests. JAX and NumPy read the variables when they start."""

import virtual_devices

virtual_devices.prepare()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# Modules that tests of several folders share: said here, before the first of them is imported.
pytest.register_assert_rewrite(
    "ops_problem", "test_attention_conformance", "device_cases", "group_problem", "feature_check"
)


FEW_OPTIMIZATIONS = "jax_disable_most_optimizations"


@pytest.fixture(autouse=True, scope="session")
def quick_programs():
    """Has XLA spend little on the machine code of programs for CPUs: most are compiled for seconds and run
    once. What it makes of them before is the same, and so are our kernels.
    """
    jax.config.update(FEW_OPTIMIZATIONS, virtual_devices.cuda_devices() == 0)


@pytest.fixture(scope="module")
def all_optimizations(quick_programs):
    """Programs as users have them, none of which was compiled otherwise before."""
    before = jax.config.read(FEW_OPTIMIZATIONS)
    jax.config.update(FEW_OPTIMIZATIONS, False)
    jax.clear_caches()
    yield
    jax.config.update(FEW_OPTIMIZATIONS, before)
    jax.clear_caches()


@pytest.fixture
def rng():
    """A fresh generator; its seed is printed, so that a failure can be repeated."""
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)
