"""What can be said of NVSHMEM without a GPU: the layout of its structures, and what is refused."""

import ctypes
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from magi_jax.comm import nvshmem, pools

MESH = Mesh(np.array(jax.devices()[:2]), ("cp",))
SEATS = pools.seats_of(MESH, "cp")


def test_structures_have_the_sizes_of_the_headers():
    names = ("_UniqueId", "_IdArguments", "_Arguments", "_Attributes")
    assert [ctypes.sizeof(getattr(nvshmem, name)) for name in names] == [128, 24, 128, 144]


def test_a_missing_wheel_is_named(monkeypatch):
    monkeypatch.setattr(pools, "find_library", lambda: None)
    with pytest.raises(NotImplementedError, match="needs the wheel nvidia-nvshmem"):
        pools.open_heap(MESH, SEATS, 1.0)


def test_each_device_needs_its_process(monkeypatch):
    monkeypatch.setattr(pools, "find_library", lambda: Path("libnvshmem_host.so.3"))
    with pytest.raises(NotImplementedError, match="2 devices are in 1 processes"):
        pools.open_heap(MESH, SEATS, 1.0)


def test_the_library_is_found_beside_other_wheels(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    assert nvshmem.find_library() is None or nvshmem.find_library().exists()
    library = tmp_path / "nvidia" / "nvshmem" / "lib" / "libnvshmem_host.so.3"
    library.parent.mkdir(parents=True)
    library.touch()
    assert nvshmem.find_library() == library
