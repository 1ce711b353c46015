"""The public names of `magi_jax`: all resolve, and type checkers see the same ones."""

import ast
from pathlib import Path

import pytest

import magi_jax as mj


def test_every_public_name_resolves_and_is_listed():
    for name in mj.__all__:
        assert getattr(mj, name) is not None
        assert name in dir(mj)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(mj.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.name for node in block.body for alias in node.names]
    assert sorted(imported) == sorted(mj.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'magi_jax' has no attribute 'flash'"):
        mj.flash  # noqa: B018
