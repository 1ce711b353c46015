"""Promises are kept by programs as users have them: their bits depend on how XLA compiles them."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def every_optimization(quick_programs):
    """Undoes `quick_programs`, and forgets what was compiled under it."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    jax.clear_caches()
    yield
    jax.config.update(name, before)
    jax.clear_caches()
