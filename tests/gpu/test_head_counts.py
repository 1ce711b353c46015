"""Groups of any size, and as many heads as a folded batch makes."""

import pytest
from device_cases import PATHS, Case, check, expected, run

from magi_jax import masks

COUNTS = [(3, 3), (5, 1), (7, 1), (12, 1), (20, 4), (24, 2), (48, 1), (128, 1), (768, 256)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
@pytest.mark.parametrize("heads", COUNTS, ids=lambda heads: "{}:{}".format(*heads))
def test_heads(path, heads):
    mask = masks.varlen([70, 1, 100], causal=True)
    case = Case(mask, num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, v_head_dim=64)
    check(run(path, case), expected(case), case.dtype)
