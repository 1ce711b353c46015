"""docs/features.md says what the tests do."""

import ast
import itertools
import sys
from pathlib import Path

import feature_pairs

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import feature_table  # noqa: E402


def names_in(path: Path) -> set[str]:
    """Tests of a file: functions, and functions of other files under a name of their own."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_the_page_is_what_the_script_writes():
    assert feature_table.PAGE.read_text() == feature_table.page()


def test_every_named_test_exists():
    """Those of a GPU too, which are not collected without one."""
    ids = [*itertools.chain(*feature_table.OWN.values())]
    for name in ("test_one_device", "test_distributed"):
        ids += [f"tests/features/test_feature_pairs.py::{name}"]
        ids += [f"tests/gpu/test_features_on_gpu.py::{name}"]
    for test in ids:
        path, name = test.split("::")
        assert name in names_in(ROOT / path), f"there is no {test}"


def test_every_pair_of_levels_meets():
    for factors, cases in (
        (feature_pairs.ONE_DEVICE, feature_pairs.one_device_cases()),
        (feature_pairs.DISTRIBUTED, feature_pairs.distributed_cases()),
    ):
        for a, b in itertools.combinations(factors, 2):
            for x, y in itertools.product(factors[a], factors[b]):
                impossible = frozenset({(a, x), (b, y)}) in feature_pairs.IMPOSSIBLE
                met = any(case[a] == x and case[b] == y for case in cases)
                assert met != impossible, ((a, x), (b, y))
