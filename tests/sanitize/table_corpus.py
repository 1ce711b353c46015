"""Writes valid slice tables in the form that `table_fuzzer.cc` reads: what it starts from."""

from pathlib import Path

import numpy as np

from magi_jax.masks import AttnMask
from magi_jax.plan import slice_table
from magi_jax.testing.hostile_masks import FAMILIES, hostile_mask

TILE_SIZES = (1, 16, 50, 128, 1024)
MAX_ENTRIES = 64


def write_corpus(folder: Path, seed: int = 0) -> list[Path]:
    """One table of each family of hostile masks and each tile size, where it is small enough."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    written = []
    for family in FAMILIES:
        for code, tile_size in enumerate(TILE_SIZES):
            # Tiles of one row would need more entries than the fuzzer has room for.
            most = 24 if tile_size == 1 else 300
            q_len, k_len = (int(n) for n in rng.integers(1, most + 1, 2))
            data = _encode(hostile_mask(rng, q_len, k_len, family).mask, code)
            if data is not None:
                written.append(folder / f"{family}_{tile_size}")
                written[-1].write_bytes(data)
    return written


def _encode(mask: AttnMask, code: int) -> bytes | None:
    table = slice_table(mask, tile_size=TILE_SIZES[code])
    parts = [[mask.q_len, mask.k_len, code, len(table.slices)], table.slices]
    for walk in (table.by_query, table.by_key):
        parts += [[len(walk.runs), len(walk.ids)], walk.ptr, walk.runs, walk.ids, walk.order]
    sizes = (table.slices, *table.by_query[1:3], *table.by_key[1:3])
    if max(map(len, sizes)) > MAX_ENTRIES:
        return None
    return np.concatenate([np.ravel(part) for part in parts]).astype("<i4").tobytes()
