"""The short form of `make fuzz`: fresh seeds each time, a minute's worth of everything in seconds."""

import fuzz_blocks
import fuzz_distributed
import fuzz_parts
import fuzz_single
import numpy as np
import pytest

from magi_jax.testing.hostile_masks import FAMILIES, hostile_mask
from magi_jax.testing.hostile_values import KINDS, hostile_values


@pytest.mark.parametrize(
    ("name", "count"),
    [("square", 40), ("half", 40), ("one_walk", 25), ("small_tiles", 25), ("thousands", 1)],
)
def test_single_device(name, count, rng):
    driver = fuzz_single.SingleDevice(name, ("cpu",))
    for seed in rng.integers(0, 2**31, count).tolist():
        _run(driver, name, seed)


@pytest.mark.parametrize("name", ["blocks_index", "blocks_bool_causal"])
def test_tables_built_on_the_device(name, rng):
    driver = fuzz_blocks.BlockTables(name, ("cpu",))
    for seed in rng.integers(0, 2**31, 20).tolist():
        _run(driver, name, seed)


@pytest.mark.parametrize("name", fuzz_parts.PARTS)
def test_results_in_parts(name, rng):
    driver = fuzz_parts.InParts(name, ("cpu",))
    for seed in rng.integers(0, 2**31, 10).tolist():
        _run(driver, name, seed)


@pytest.mark.parametrize(
    ("name", "count"), [("cp8_balanced", 25), ("cp2_zigzag", 25), ("cp4_late", 15)]
)
def test_distributed(name, count, rng):
    driver = fuzz_distributed.Distributed(name)
    for seed in rng.integers(0, 2**31, count).tolist():
        _run(driver, name, seed)


def _run(driver, name, seed):
    try:
        driver.run(seed)
    except AssertionError as error:
        raise AssertionError(f"{name}:{seed}: {error}") from error


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_show_the_cells_of_their_definition(family, rng):
    for q_len, k_len in [(1, 1), (1, 7), (7, 1), (31, 31), (67, 129), (128, 64)]:
        for _ in range(6):
            hostile_mask(rng, q_len, k_len, family)  # compares with the definition


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_what_their_kind_says(kind, rng):
    dense = rng.random((40, 50)) < 0.02
    values = hostile_values(rng, dense, (2, 1, 4, 4), np.float32, kind)
    poison = sum((~np.isfinite(x)).sum() for x in values.operands)
    assert (poison > 0) == (values.bad_queries.any() or values.bad_keys.any())
    assert kind != "hidden_poison" or poison
    assert all(np.isfinite(x).all() for x in values.clean)
