"""Light models, which are not tracked, are built before any test runs; searches without options are short."""

import pytest

from scripts import build_models


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        build_models.main([])


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgc.api.step_planning.DEFAULT_SECONDS", 0.3)
