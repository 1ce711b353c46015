"""Tests that the documentation names exist, so that no promise rests on one that was renamed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
NAMED = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page):
    for file, test in NAMED.findall(page.read_text()):
        path = ROOT / file
        assert path.is_file(), file
        # Suites of other folders are taken over by assignment.
        known = re.search(rf"^(def {test}\(|{test} = )", path.read_text(), re.MULTILINE)
        assert not test or known, f"{file} has no {test}"
