"""Runs pytest on the tests, for build systems that want a program."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main([str(Path(__file__).resolve().parent.parent / "tests"), *sys.argv[1:]]))
