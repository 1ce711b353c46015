"""The walks of kernels: the compiled builder against the one in NumPy."""

import itertools

import numpy as np
import pytest

from magi_jax.masks import bands
from magi_jax.solver.slice_table import compiled_tile_runs, tile_runs, write_ranges
from magi_jax.testing.cases import mask_cases, random_mask

CASES = mask_cases(157)


def assert_same(slices, part, num_parts, length, tile_size):
    expected = tile_runs(slices, part, num_parts, length, tile_size)
    found = compiled_tile_runs(slices, part, num_parts, length, tile_size)
    for name, a, b in zip(expected._fields, expected, found, strict=True):
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert (a == b).all(), name


@pytest.mark.parametrize("tile_size", [1, 7, 16, 128])
@pytest.mark.parametrize("name", sorted(CASES))
def test_compiled_walks_are_those_of_numpy(name, tile_size):
    mask = CASES[name]
    part = np.zeros(len(mask.slices), np.int64)
    assert_same(mask.slices, part, 1, mask.q_len, tile_size)
    assert_same(bands.transpose(mask.slices), part, 1, mask.k_len, tile_size)


def test_parts_with_and_without_slices():
    rng = np.random.default_rng(5)
    for _ in range(20):
        found = [random_mask(rng, 90, 90, 8).slices for _ in range(4)]
        part = np.repeat([0, 2, 3, 6], [len(slices) for slices in found])
        assert_same(np.concatenate(found), part, 8, 90, 16)


def grid_of_slices(rng, length):
    """Rectangles and bands between random lines, in any order: long stretches of like tiles."""
    q_lines, k_lines = (
        np.unique(np.append(rng.integers(0, length, rng.integers(0, 5)), [0, length]))
        for _ in range(2)
    )
    rows = []
    for q0, q1 in itertools.pairwise(q_lines.tolist()):
        for k0, k1 in itertools.pairwise(k_lines.tolist()):
            low, high = k0 - q1 + 1, k1 - 1 - q0
            kind = rng.random()
            if kind < 0.3:
                low, high = sorted(rng.integers(low, high + 1, 2).tolist())
            if kind < 0.8:
                rows.append((q0, q1, k0, k1, low, high))
    slices = bands.clip(np.array(rows, np.int64).reshape(-1, bands.NUM_COLUMNS))
    return rng.permutation(slices[bands.is_visible(slices)])


@pytest.mark.parametrize("seed", range(6))
def test_stretches_of_tiles_that_the_same_slices_meet(seed):
    rng = np.random.default_rng(seed)
    for tile_size in (1, 2, 5, 16):
        length = int(rng.integers(20, 300))
        found = [grid_of_slices(rng, length) for _ in range(3)]
        part = np.repeat(range(3), [len(slices) for slices in found])
        slices = np.concatenate(found)
        assert_same(slices, part, 3, length, tile_size)
        assert_same(bands.transpose(slices), part, 3, length, tile_size)


def test_engines_write_ranges_alike():
    rng = np.random.default_rng(6)
    edges = np.sort(rng.choice(200, 30, replace=False))
    at, count, rank = edges[:-1], np.diff(edges) - 1, rng.integers(0, 3, 29)
    tables = [np.full((3, 200), -7, np.int32) for _ in range(2)]
    for engine, table in zip(("compiled", "numpy"), tables, strict=True):
        write_ranges(engine, table, rank, at, count, 1000 - 5 * at)
    assert (tables[0] == tables[1]).all()
    assert (tables[0] != -7).sum() == count.sum()
    with pytest.raises(ValueError, match="outside of the table"):
        write_ranges("compiled", tables[0], *(np.array([x]) for x in (0, 198, 3, 0)))


def test_bad_slices_are_refused():
    slices = np.array([[0, 4, 0, 4, -3, 3]])
    with pytest.raises(ValueError, match="part must rise within range"):
        compiled_tile_runs(slices, np.array([1]), 1, 4)
    with pytest.raises(ValueError, match="empty or out of range"):
        compiled_tile_runs(slices, np.array([0]), 1, 3)
