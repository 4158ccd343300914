"""Examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES: tuple[str, ...] = ("onnxgc.planning.memory_budget",)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0
