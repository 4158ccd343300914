"""The light models are not tracked: they are built before any test runs."""

import pytest

from scripts import build_models


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        build_models.main([])
