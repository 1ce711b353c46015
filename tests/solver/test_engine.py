"""The compiled planner is taken where it fits the sources, and refused in words where it does not."""

import pytest

from magi_jax.solver import engine


def test_the_compiled_module_has_the_interface_of_the_sources():
    assert engine.compiled().interface == engine.INTERFACE


def test_a_stale_module_is_refused(monkeypatch):
    monkeypatch.setattr(engine, "INTERFACE", engine.INTERFACE + 1)
    found, needed = engine.INTERFACE - 1, engine.INTERFACE
    message = rf"/_planner.*\.so has interface {found} of the planner.* need {needed}: .* engine="
    with pytest.raises(ImportError, match=message):
        engine.compiled.__wrapped__()


def test_unknown_engines_are_named():
    with pytest.raises(ValueError, match=r"engine must be one of .* got 'quantum'"):
        engine.check_engine("quantum")
