"""The worked examples in the docstrings of `areal_lite/algo`."""

import doctest
import importlib
import pkgutil

import pytest

from areal_lite import algo


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(algo.__path__)])
def test_the_docstring_examples_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"areal_lite.algo.{name}")).failed == 0
