"""What is trained: a training file, and the forward model that it was made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxgc.api.pipeline import OptimizeResult, ReadOptions, optimize
from onnxgc.emission.write import data_file
from onnxgc.errors import OutputFileError, PlanError, TrainingError
from onnxgc.model.core.ir import Array
from onnxgc.model.files.evaluation_file import Deployment
from onnxgc.model.files.load import files_of, load_proto
from onnxgc.model.read import classified
from onnxgc.model.weight_roles.classify import Role
from onnxgc.model.weight_roles.initialization import draw_weights
from onnxgc.tracing.optimizers import SGD, Accumulation, AdamW
from onnxgc.training.files import TrainingFile

Model = str | os.PathLike[str] | onnx.ModelProto
_OF_READING = ("loss", "trainable", "freeze", "freeze_bn", "untie")


@dataclass(frozen=True, slots=True)
class Source:
    """A training file with the forward model, as far as that is known.

    `drawn` are the values of weights that the model's file does not store, `options` say how it is read, and
    `report` is what `optimize` said of it, where it was asked.
    """

    file: TrainingFile
    model: Model | None
    optimizer: SGD | AdamW
    options: ReadOptions
    drawn: Mapping[str, Array] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_file(cls, training: Model, model: Model | None) -> Source:
        """A training file that has its optimizer.

        Raises:
            TrainingError: it has none.
        """
        file = TrainingFile.of(training)
        if not isinstance(file.optimizer, SGD | AdamW):
            raise TrainingError(
                "the training file has no optimizer; make it with `onnxgc optimize --optimizer adamw`, or "
                "give the forward model"
            )
        options = ReadOptions.from_json(file.options)
        return cls(file, model, file.optimizer, replace(options, optimizer=None))

    @classmethod
    def of_model(
        cls,
        model: Model,
        optimizer: SGD | AdamW,
        *,
        accumulates: bool,
        batch: int | None,
        seed: int,
        tell: Callable[[str], None],
        options: Mapping[str, Any],
    ) -> Source:
        """A forward model, planned for batches of so many samples; `options` are those of `optimize`."""
        settings = dict(options)
        shapes = dict(settings.pop("input_shapes", None) or {})
        batch = batch_of(model, shapes, batch)
        if batch is not None:
            shapes = {**_shapes_at(model, batch), **shapes}
        result = optimize(
            model,
            optimizer=Accumulation() if accumulates else optimizer,
            input_shapes=shapes,
            progress=tell,
            **settings,
        )
        drawn = draw_weights(result.planned.model, seed, only_constant_filled=True)
        drawn = {**drawn, **result.values}
        graph = replace(result, values=drawn).training_graph.model
        options_read = replace(result.options, optimizer=None)
        return cls(TrainingFile.of(graph), model, optimizer, options_read, drawn, result.report)

    def shapes_of(self, samples: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's inputs for another number of samples."""
        file = self.file
        return {
            name: (samples, *file.types[name].shape[1:])
            if file.counts_samples(name)
            else file.types[name].shape
            for name in file.fed
            if name != file.target
        }

    def file_of(self, samples: int) -> TrainingFile:
        """The same step for another number of samples, under the same plan where it has the same operators.

        Raises:
            BudgetError: no plan for so many samples keeps to the peak of this one.
        """

        def planned(**how: Any) -> OptimizeResult:
            assert self.model is not None, "sizes are checked before"
            return optimize(
                self.model,
                optimizer=self.file.optimizer,
                input_shapes=self.shapes_of(samples),
                values=self.drawn,
                check=False,
                **how,
                **{key: getattr(self.options, key) for key in _OF_READING},
            )

        try:
            result = planned(plan=self.file.plan)
        except PlanError:
            # Gradients of another size may have other forms.
            result = planned()
        if result.planned.profile.peak_bytes > self.file.simulated_peak_bytes:
            result = planned(budget=str(self.file.simulated_peak_bytes + result.planned.state_bytes))
        return TrainingFile.of(result.training_graph.model, with_values=False)

    def deployed(self, trained: Mapping[str, Array]) -> onnx.ModelProto:
        """The model's own file with these weights; names, opset and metadata stay.

        Raises:
            TrainingError: the forward model was not given, or its file has no place for the weights.
        """
        if self.model is None:
            raise TrainingError("to export, give the forward model beside the training file")
        if self.options.untie:
            raise TrainingError("parameters that were untied have no place of their own in the model's file")
        proto, folder = load_proto(self.model)
        draft, decisions = classified(
            proto, folder, trainable=self.options.trainable, freeze=self.options.freeze
        )
        held = {
            decision.name: draft.weights[decision.name].type.dtype
            for decision in decisions
            if decision.name in trained
            or (decision.role is not Role.CONSTANT and decision.name in self.drawn)
        }
        lost = [name for name in trained if name not in held]
        if lost:
            raise TrainingError(
                f"the model has no weight '{lost[0]}', which was trained; give the model that the training "
                "file was made of"
            )
        deployment = Deployment(proto, folder, draft.nodes, draft.weights, held)

        def value_of(name: str, dtype: int) -> Array:
            found = trained[name] if name in trained else self.drawn[name]
            return np.asarray(found, helper.tensor_dtype_to_np_dtype(dtype))

        return deployment.filled(value_of)

    def check_apart(self, path: str | os.PathLike[str]) -> None:
        """Refuse to write over the model, or over a file that has its weights.

        Raises:
            OutputFileError: the path, or the file for large weights beside it, is one of these.
        """
        if self.model is None or isinstance(self.model, onnx.ModelProto):
            return
        read = [file for file in files_of(self.model) if os.path.exists(file)]
        for written in (path, data_file(path)):
            if os.path.exists(written) and any(os.path.samefile(written, file) for file in read):
                raise OutputFileError(
                    f"'{written}' belongs to the model that was read; give the trained model another name"
                )

    @property
    def has_external_data(self) -> bool:
        """Whether the model's weights lie in another file than the model."""
        if self.model is None or isinstance(self.model, onnx.ModelProto):
            return False
        stored = load_proto(self.model)[0].graph.initializer
        return any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in stored)


def batch_of(
    source: Model, shapes: Mapping[str, Sequence[int]], batch: int | None, default: int | None = None
) -> int | None:
    """How many samples a step takes, by `batch` or by the shapes that inputs are given.

    Raises:
        TrainingError: these differ, or a batch has no samples.
    """
    if batch is not None and batch < 1:
        raise TrainingError(f"a batch of {batch} samples is none; give at least 1")
    if not shapes:
        return default if batch is None else batch
    graph = load_proto(source)[0].graph
    counted = _first_dimensions(graph)
    first = next(iter(counted.values()), "")
    given = {name: shapes[name][0] for name, size in counted.items() if size == first and shapes.get(name)}
    for name, samples in given.items():
        if batch is not None and samples != batch:
            raise TrainingError(
                f"batches of {batch} are asked for, and the shape given to '{name}' has {samples} samples"
                "; give one of them, or the same number in both"
            )
    return batch or next(iter(given.values()), default)


def _first_dimensions(graph: onnx.GraphProto) -> dict[str, int | str]:
    """For each input whose first dimension counts samples, its number or name.

    Samples are counted by first dimensions without a number, else by those of the first input's number.
    """
    stored = {tensor.name for tensor in graph.initializer}
    sizes: dict[str, int | str] = {}
    for value in graph.input:
        shape = value.type.tensor_type.shape.dim
        if value.name not in stored and shape:
            sizes[value.name] = shape[0].dim_value or shape[0].dim_param
    is_named = any(isinstance(size, str) for size in sizes.values())
    first = next(iter(sizes.values()), 0)
    return {
        name: size for name, size in sizes.items() if (isinstance(size, str) if is_named else size == first)
    }


def _shapes_at(source: Model, batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes of inputs with another number of samples, where all their other dimensions are numbers."""
    graph = load_proto(source)[0].graph
    counted = _first_dimensions(graph)
    shapes = {
        value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim)
        for value in graph.input
    }
    return {name: (batch, *shapes[name][1:]) for name in counted if all(shapes[name][1:])}
