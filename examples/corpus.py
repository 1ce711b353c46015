"""Real documents that every machine has: the source files of the Python standard library, as bytes."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256


def source_files() -> list[Path]:
    """Source files of the running Python's standard library, sorted."""
    library = Path(sysconfig.get_paths()["stdlib"])
    installed = ("site-packages", "dist-packages")
    files = (path for path in library.rglob("*.py") if not set(installed) & set(path.parts))
    return sorted(path for path in files if path.stat().st_size)


def documents(files: list[Path], seed: int) -> Iterator[np.ndarray]:
    """Endless stream of documents in an order that the seed decides; int32 ``[length]`` each."""
    rng = np.random.default_rng(seed)
    while True:
        for index in rng.permutation(len(files)):
            yield np.frombuffer(files[index].read_bytes(), np.uint8).astype(np.int32)
