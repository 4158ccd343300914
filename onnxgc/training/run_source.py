"""The source of a run: a training file and its forward model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from onnxgc.api.pipeline import OptimizeResult, optimize
from onnxgc.api.read_options import ReadOptions
from onnxgc.errors import PlanError, TrainingError
from onnxgc.model.core.ir import Array
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.files.load import load_proto
from onnxgc.tracing.optimizers import Accumulation, UpdateRule, optimizer_of
from onnxgc.training.deployment import Model, deployed
from onnxgc.training.training_file import TrainingFile, is_training_file

_OF_READING = ("loss", "trainable", "freeze", "freeze_bn", "untie", "provider", "pools", "portable")


@dataclass(frozen=True, slots=True)
class Source:
    """A training file with its forward model, if known.

    `drawn` are values of weights that the model's file does not store, `options` the options of reading it,
    and `report` the report of `optimize`, empty for a given training file.
    """

    file: TrainingFile
    model: Model | None
    optimizer: UpdateRule
    options: ReadOptions
    drawn: Mapping[str, Array] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def choose(
        cls,
        given: Model,
        model: Model | None,
        planning: Mapping[str, Any],
        *,
        provider: str,
        seed: int,
        progress: Callable[[str], None],
    ) -> "Source":
        """A training file with its forward model, or a forward model to be planned.

        `planning` are the options for a forward model: optimizer, batch, accumulate, workers and those of
        `optimize`. `provider` runs the steps and decides the forms of gradients.

        Raises:
            TrainingError: the arguments contradict one another.
        """
        if is_training_file(given if isinstance(given, onnx.ModelProto) else load_proto(given)[0]):
            if planning:
                raise TrainingError(
                    f"{', '.join(planning)} cannot be changed in a training file; pass them when you create "
                    "the file, or train from the forward model"
                )
            return cls.from_file(given, model)
        if model is not None:
            raise TrainingError("two forward models are given; give one, or a training file and its model")
        options = {"provider": provider, **planning}
        optimizer = optimizer_of(options.pop("optimizer", "adamw"))
        if not isinstance(optimizer, UpdateRule):
            raise TrainingError("training needs an optimizer, such as adamw")
        progress("planning")
        accumulates = [options.pop(name, None) is not None for name in ("accumulate", "workers")]
        return cls.from_model(
            given,
            optimizer,
            accumulates=any(accumulates),
            batch=options.pop("batch", None),
            seed=seed,
            progress=progress,
            options=options,
        )

    @classmethod
    def from_file(cls, training: Model, model: Model | None) -> "Source":
        """A training file with an optimizer.

        Raises:
            TrainingError: the file has no optimizer.
        """
        file = TrainingFile.read(training)
        if not isinstance(file.optimizer, UpdateRule):
            raise TrainingError(
                "the training file has no optimizer; create it with `onnxgc optimize --optimizer adamw`, or "
                "give the forward model"
            )
        options = ReadOptions.from_json(file.options)
        return cls(file, model, file.optimizer, replace(options, optimizer=None))

    @classmethod
    def from_model(
        cls,
        model: Model,
        optimizer: UpdateRule,
        *,
        accumulates: bool,
        batch: int | None,
        seed: int,
        progress: Callable[[str], None],
        options: Mapping[str, Any],
    ) -> "Source":
        """Plans a forward model for batches of `batch` samples; `options` are those of `optimize`."""
        settings = dict(options)
        shapes = dict(settings.pop("input_shapes", None) or {})
        batch = batch_of(model, shapes, batch)
        if batch is not None:
            shapes = {**_shapes_at(model, batch), **shapes}
        result = optimize(
            model,
            optimizer=Accumulation() if accumulates else optimizer,
            input_shapes=shapes,
            progress=progress,
            **settings,
        )
        drawn = draw_weights(result.planned.model, seed, only_constant_filled=True)
        drawn = {**drawn, **result.values}
        file = _without_barriers(replace(result, values=drawn))
        options_read = replace(result.options, optimizer=None)
        return cls(file, model, optimizer, options_read, drawn, result.report)

    def shapes_of(self, samples: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's inputs for another number of samples."""
        file = self.file
        return {
            name: (samples, *file.types[name].shape[1:]) if file.counts_samples(name) else file.types[name].shape
            for name in file.fed
            if name != file.target
        }

    def file_of(self, samples: int) -> TrainingFile:
        """The same step for another number of samples, under the same plan if its operators are the same.

        Raises:
            BudgetError: no plan for this number of samples stays within the peak of this step.
        """

        def planned(**how: Any) -> OptimizeResult:
            assert self.model is not None, "sizes are checked earlier"
            return optimize(
                self.model,
                optimizer=self.file.optimizer,
                input_shapes=self.shapes_of(samples),
                values=self.drawn,
                check=False,
                **how,
                loss_model=self.options.loss_proto,
                **{key: getattr(self.options, key) for key in _OF_READING},
            )

        try:
            result = planned(plan=self.file.plan)
        except PlanError:
            # Gradients of another size may take other forms.
            result = planned()
        if result.planned.profile.peak_bytes > self.file.simulated_peak_bytes:
            result = planned(budget=str(self.file.simulated_peak_bytes + result.planned.state_bytes))
        return _without_barriers(result, with_values=False)

    def deployed(self, trained: Mapping[str, Array]) -> onnx.ModelProto:
        """The model's file with these weights; names, opset and metadata are unchanged.

        Raises:
            TrainingError: the forward model was not given, or its file lacks the weights.
        """
        if self.model is None:
            raise TrainingError("export needs the forward model; pass it together with the training file")
        if self.options.untie:
            raise TrainingError("untied parameters cannot be exported: the model's file stores them once")
        return deployed(self.model, trained, self.drawn, trainable=self.options.trainable, freeze=self.options.freeze)


def _without_barriers(result: OptimizeResult, *, with_values: bool = True) -> TrainingFile:
    """The training file for sessions of `make_session`, most of which keep the order without barriers."""
    result = replace(result, options=replace(result.options, state="initializers"))
    bare = replace(result, options=replace(result.options, has_barriers=False))
    file = TrainingFile.read(bare.training_graph.model, with_values=with_values)
    if not result.options.has_barriers:
        return file

    def with_barriers() -> TrainingFile:
        return TrainingFile.read(result.training_graph.model, with_values=False)

    return replace(file, with_barriers=with_barriers)


def batch_of(
    source: Model, shapes: Mapping[str, Sequence[int]], batch: int | None, default: int | None = None
) -> int | None:
    """Samples of a step, from `batch` or from the given shapes of inputs.

    Raises:
        TrainingError: these contradict, or a batch has no samples.
    """
    if batch is not None and batch < 1:
        raise TrainingError(f"a batch of {batch} samples is not possible; give at least 1")
    if not shapes:
        return default if batch is None else batch
    graph = load_proto(source)[0].graph
    counted = _first_dimensions(graph)
    first = next(iter(counted.values()), "")
    given = {name: shapes[name][0] for name, size in counted.items() if size == first and shapes.get(name)}
    for name, samples in given.items():
        if batch is not None and samples != batch:
            raise TrainingError(
                f"the batch is {batch}, and the shape given for '{name}' has {samples} samples; give one of "
                "them, or the same number in both"
            )
    return batch or next(iter(given.values()), default)


def _first_dimensions(graph: onnx.GraphProto) -> dict[str, int | str]:
    """The size or symbolic name of the first dimension, for each input that has samples along it.

    These are the inputs with a symbolic first dimension, or else those as long as the first input.
    """
    stored = {tensor.name for tensor in graph.initializer}
    sizes: dict[str, int | str] = {}
    for value in graph.input:
        shape = value.type.tensor_type.shape.dim
        if value.name not in stored and shape:
            sizes[value.name] = shape[0].dim_value or shape[0].dim_param
    is_named = any(isinstance(size, str) for size in sizes.values())
    first = next(iter(sizes.values()), 0)
    return {name: size for name, size in sizes.items() if (isinstance(size, str) if is_named else size == first)}


def _shapes_at(source: Model, batch: int) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs for another number of samples, for inputs whose other dimensions are known."""
    graph = load_proto(source)[0].graph
    counted = _first_dimensions(graph)
    shapes = {value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim) for value in graph.input}
    return {name: (batch, *shapes[name][1:]) for name in counted if all(shapes[name][1:])}
