"""Promises are kept by programs as users have them: their bits depend on how XLA compiles them."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def as_users_have_them(all_optimizations):
    """Undoes `quick_programs`."""
