"""Tensors of more than 2^31 elements and 2^32 bytes: no offset of a kernel wraps."""

import pytest
from device_cases import PATHS
from large_buffers import Sizes, check, check_merged


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
@pytest.mark.parametrize("kv_heads", [64, 8])
def test_more_elements_than_32_bits_count(path, kv_heads):
    errors = check(path.name, Sizes(rows=270_001, heads=64, kv_heads=kv_heads))
    assert max(errors.values()) < 0.02, errors


@pytest.mark.parametrize("path", PATHS[:2], ids=lambda path: path.name)
def test_merging_into_more_elements_than_32_bits_count(path):
    assert check_merged(path.name, Sizes(rows=270_001, heads=64, kv_heads=8)) < 0.02
