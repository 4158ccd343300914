"""The training file to write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import onnx

from onnxgc.emission.atomic_files import check_model_writable, data_file, write_model
from onnxgc.errors import OutputFileError
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.core.stored_weights import external_file


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The path of the training file, or None to write nothing."""

    path: str | None
    external_data: bool = False

    @classmethod
    def of(
        cls, output: str | os.PathLike[str] | None, *, external_data: bool, dry_run: bool
    ) -> OutputOptions:
        return cls(None if dry_run or output is None else os.fspath(output), external_data)

    def check(self, source: Any) -> None:
        """Check before any work.

        Raises:
            OutputFileError: the path is not writable, or belongs to the source model.
        """
        if self.path is not None:
            check_model_writable(self.path)
            self._check_distinct(source if isinstance(source, str | os.PathLike) else None)

    def check_weights(self, model: TrainableModel) -> None:
        """Check that no weights of the model are stored at the path.

        Raises:
            OutputFileError: they are.
        """
        for weight in model.weights.values():
            self._check_distinct(external_file(weight))

    def _check_distinct(self, source: str | os.PathLike[str] | None) -> None:
        if self.path is None or source is None or not os.path.exists(source):
            return
        for written in (self.path, data_file(self.path)):
            if os.path.exists(written) and os.path.samefile(written, source):
                raise OutputFileError(
                    f"'{written}' belongs to the source model; give the training file another name"
                )

    def write(self, model: onnx.ModelProto) -> None:
        if self.path is not None:
            write_model(model, self.path, external_data=self.external_data)
