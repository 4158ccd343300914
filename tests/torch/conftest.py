"""A faster exporter for tests that export many modules."""

import functools
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="session")
def cached_exporter() -> Iterator[None]:
    """Shares PyTorch's table of ONNX functions between exports: building it takes a third of their time."""
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    registry = registration.ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib)))
        yield
