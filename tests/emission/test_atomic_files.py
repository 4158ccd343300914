"""A model and its external weights stay consistent if a write is interrupted at any point."""

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgc.emission.atomic_files import write_model
from tests.api.chains import chain


class Killed(BaseException):
    """The process was killed."""


def filled(value: float) -> onnx.ModelProto:
    model = chain(2, width=32)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.full(tensor.dims, value, np.float32), tensor.name))
    return model


def value_of(path: Path) -> float:
    (value,) = {float(x) for t in onnx.load(path).graph.initializer for x in numpy_helper.to_array(t).flat}
    return value


def kill_after(changes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After this many changes of files every further one fails, clean-up included."""
    made = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made > changes:
                raise Killed
            return change(*arguments, **options)

        return changed

    for owner, name in ((os, "replace"), (shutil, "copyfile"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def is_interrupted(changes: int, value: float, path: Path) -> bool:
    """Writes a model, killed after `changes` changes of files; whether the write was incomplete."""
    with pytest.MonkeyPatch.context() as patched:
        kill_after(changes, patched)
        try:
            write_model(filled(value), path, external_data=True)
        except Killed:
            return True
    return False


def test_an_interrupted_write_leaves_a_complete_model(tmp_path: Path):
    max_changes = 8
    found = set()
    for first, second in product(range(max_changes), repeat=2):
        path = tmp_path / f"{first}.{second}" / "trained.onnx"
        path.parent.mkdir()
        write_model(filled(1), path, external_data=True)
        was_interrupted = is_interrupted(first, 2, path)
        before = value_of(path)
        assert before in (1, 2)
        is_interrupted(second, 3, path)
        assert value_of(path) in (before, 3)
        found.add((before, value_of(path)))
        # The next write succeeds and cleans up.
        write_model(filled(4), path, external_data=True)
        assert value_of(path) == 4
        kept = [name.name for name in path.parent.iterdir() if not name.name.startswith(".")]
        assert sorted(kept) == ["trained.onnx", "trained.onnx.data"]
    assert found == {(1, 1), (1, 3), (2, 2), (2, 3)}
    assert not was_interrupted, "a write makes more changes than were tried"


def test_without_disk_space_for_a_copy_the_weights_keep_their_temporary_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "trained.onnx"
    write_model(filled(1), path, external_data=True)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        written = write_model(filled(2), path, external_data=True)
    assert value_of(path) == 2
    assert set(tmp_path.iterdir()) == set(written)
