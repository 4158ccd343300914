"""The files that `optimize` writes: the training file, its state file and its evaluation file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from onnxgc.emission.atomic_files import check_model_writable, check_writable, data_file, without_contents, write_model
from onnxgc.emission.contract import contract_of
from onnxgc.emission.state_file import metadata_of, state_file, write_arrays
from onnxgc.emission.training_graph import TrainingGraph
from onnxgc.errors import OutputFileError
from onnxgc.model.core.ir import Weight


@dataclass(frozen=True, slots=True)
class Target:
    """The training file to write at `path`, and `evaluation`, the evaluation file if any.

    With `references` external weights of the model stay in their files.
    """

    path: str
    external_data: bool
    stores_state: bool
    evaluation: str | None
    references: bool = False

    @property
    def state(self) -> str | None:
        """The state file, unless the training file stores the state itself."""
        return None if self.stores_state else state_file(self.path)

    def check_writable(self) -> None:
        """Fails early.

        Raises:
            OutputFileError: a file cannot be written, or two have the same name.
        """
        check_model_writable(self.path)
        if self.state is not None:
            check_writable(self.state)
        if self.evaluation is not None:
            check_model_writable(self.evaluation)
            if os.path.realpath(self.evaluation) in map(os.path.realpath, (self.path, data_file(self.path))):
                raise OutputFileError(
                    f"'{self.evaluation}' is the training file; give the evaluation file another name"
                )

    def check_apart(self, *sources: str | os.PathLike[str] | None) -> None:
        """Check that no file is one of the sources.

        Raises:
            OutputFileError: one is, or an external data file is.
        """
        models = (self.path, *filter(None, [self.evaluation]))
        files = (*models, *map(data_file, models), *filter(None, [self.state]))
        for source in sources:
            for written in files:
                if source is None or not os.path.exists(source) or not os.path.exists(written):
                    continue
                if os.path.samefile(written, source):
                    raise OutputFileError(f"'{written}' belongs to the source model; give the output another name")

    def write(self, graph: TrainingGraph, evaluation: onnx.ModelProto | None, weights: Mapping[str, Weight]) -> None:
        """Writes the files; the state file first, so that a training file is never without one.

        `weights` has the contents of those that the graph has without.
        """
        if self.state is not None:
            write_arrays(graph.first_values, metadata_of(contract_of(graph.model, evaluation)), self.state)
        if evaluation is not None and self.evaluation is not None:
            write_model(evaluation, self.evaluation, external_data=self.external_data)
        streamed = {name: weights[name] for name in without_contents(graph.model)}
        write_model(
            graph.model, self.path, external_data=self.external_data, streamed=streamed, references=self.references
        )
