"""What a symmetric memory does without a GPU: it frees what it has, whatever else goes wrong."""

import pytest

from magi_jax.comm import symmetric
from magi_jax.comm.portable import PORTABLE


class Module:
    """In place of the compiled one."""

    def __init__(self, failure: str = ""):
        self.failure, self.removed = failure, []

    def pool_failure(self, pool: int) -> str:
        return self.failure

    def remove_pool(self, pool: int) -> None:
        self.removed.append(pool)


def _raise(*_):
    raise RuntimeError("another program failed")


@pytest.mark.parametrize("raising", ["effects_barrier", "meet", None])
def test_close_frees_all_and_raises_what_was_raised(raising, monkeypatch):
    module, met = Module(), []
    monkeypatch.setattr(symmetric.ffi, "load", lambda: module)
    monkeypatch.setattr(symmetric, "meet", lambda key, _: met.append(key))
    if raising:
        owner = symmetric if raising == "meet" else symmetric.jax
        monkeypatch.setattr(owner, raising, _raise)
    memory = symmetric.SymmetricMemory((3, 4), PORTABLE, 0, "")
    if raising:
        with pytest.raises(RuntimeError, match="another program failed"):
            memory.close()
    else:
        memory.close()
    assert module.removed == [3, 4]
    assert len(met) == (raising != "meet")
    memory.close()
    assert module.removed == [3, 4]


def test_a_memory_that_failed_waits_for_nobody(monkeypatch):
    module = Module("rank 0 gave up")
    monkeypatch.setattr(symmetric.ffi, "load", lambda: module)
    monkeypatch.setattr(symmetric, "meet", _raise)
    monkeypatch.setattr(symmetric.jax, "effects_barrier", _raise)
    symmetric.SymmetricMemory((3, 4), PORTABLE, 0, "").close()
    assert module.removed == [3, 4]
