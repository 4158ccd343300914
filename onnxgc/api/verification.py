"""Check a training file against the baseline: loss, gradients, order, peak."""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.api.device_memory import DeviceMemory, parse_device_memory
from onnxgc.api.feeds import feeds_of, feeds_of_updates
from onnxgc.api.pipeline import optimize
from onnxgc.api.planned_step import PlannedStep, emit, store_all_schedule
from onnxgc.api.read_options import read_with_options
from onnxgc.api.step_planning import step_with_plan
from onnxgc.api.verification_checks import (
    Check,
    ParameterShift,
    TrainingMetadata,
    default_check,
    device_check,
    gradient_check,
    loss_check,
    order_check,
    peak_check,
    size_check,
    vanishing_gradients,
)
from onnxgc.budget.search import ignore_progress
from onnxgc.emission.atomic_files import write_model
from onnxgc.emission.plan_files import is_plan_file
from onnxgc.errors import ModelFileError, PlanError, RuntimeFailedError
from onnxgc.model.core.ir import Array
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.files.load import load_proto, source_of
from onnxgc.model.files.proto_to_draft import draft_of
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.report.data.verify_report import MeasuredFigures, VerifyReport
from onnxgc.runtime.measure import Measurement, measure
from onnxgc.runtime.ort import SessionSettings


@dataclass(frozen=True, slots=True)
class Verification:
    """The checks of one training file, with the measurements.

    `planned_by_default` is None if a session with default settings rejects the file.
    """

    checks: tuple[Check, ...]
    regular: Measurement
    planned: Measurement
    planned_by_default: Measurement | None

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def as_json(self) -> VerifyReport:
        by_default = self.planned_by_default
        return {
            "holds": self.holds,
            "checks": [{"name": c.name, "holds": c.holds, "detail": c.detail} for c in self.checks],
            "regular": _measured(self.regular),
            "planned": _measured(self.planned),
            "planned_by_default": None if by_default is None else _measured(by_default),
        }


def _measured(measurement: Measurement) -> MeasuredFigures:
    return {
        "measured_requested_bytes": measurement.requested_peak_bytes,
        "measured_in_use_bytes": measurement.in_use_peak_bytes,
        "seconds": measurement.wall_seconds[-1],
        "threads": measurement.threads,
    }


def verify(
    model: Any,
    training: str | os.PathLike[str],
    *,
    seed: int = 0,
    threads: int | None = None,
    runs: int = 1,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    loss: str = "auto",
    device_memory: str | float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Run a training file and the baseline on ONNX Runtime's CPU provider, and compare them.

    Both have the same weights (the file's; drawn by `seed` where the file stores one repeated value), the
    same seeded inputs and the same session settings. If `training` is a plan file, the training file that
    `optimize` writes from it with these `input_shapes` and this `loss` is verified. With `device_memory`, as
    in `optimize`, all memory of the step must fit, by the arena's own figures.

    Raises:
        ModelFileError: `training` was not written by onnxgc, or does not belong to `model`.
        OnnxgcError: `model` cannot be read.
    """
    notify = progress or ignore_progress
    device_bytes = None if device_memory is None else parse_device_memory(device_memory)
    source = source_of(model)
    with tempfile.TemporaryDirectory() as folder:
        file = training
        if is_plan_file(training):
            file = Path(folder) / "training.onnx"
            optimize(source, file, plan=training, input_shapes=input_shapes, loss=loss, check=False, progress=notify)
        elif input_shapes or loss != "auto":
            raise PlanError("shapes and loss are those of the training file; give them with a plan file only")
        settings = SessionSettings(threads=threads)
        return _verify(source, file, seed, settings, runs, Path(folder), device_bytes, notify)


def _verify(
    source: str | os.PathLike[str] | onnx.ModelProto,
    training: str | os.PathLike[str],
    seed: int,
    settings: SessionSettings,
    runs: int,
    folder: Path,
    device_bytes: int | None,
    progress: Callable[[str], None],
) -> Verification:
    progress("reading")
    metadata = TrainingMetadata.from_file(training)
    planned = _planned_like(source, metadata)
    # A file with an optimizer returns no gradients, so their sizes are those of a file without one.
    plain = planned if planned.step.updates is None else _without_optimizer(planned, metadata)
    drawn = draw_weights(planned.model, seed, only_constant_filled=True)
    feeds = _feeds(planned, metadata, drawn, seed)
    runner = _Runs(metadata, planned, plain, feeds, settings, runs, folder, progress)
    baseline, gradients = runner.run_baseline()
    progress("running the training file")
    measured = runner.run(training)
    progress("running the training file in a session with default settings")
    default = runner.run_by_default(training)
    shift = runner.shift_parameters(training, gradients, seed)
    expected, actual = baseline.outputs, measured.outputs
    checks = [
        loss_check(metadata.loss, expected, actual),
        gradient_check(planned, expected, actual),
        size_check(plain, gradients, shift),
        order_check(metadata, measured),
        peak_check(metadata, planned, measured),
        default_check(metadata, expected, default),
    ]
    if device_bytes is not None:
        checks.append(device_check(DeviceMemory.of_step(planned.step), device_bytes, measured))
    return Verification(tuple(checks), baseline, measured, default if isinstance(default, Measurement) else None)


@dataclass(frozen=True, slots=True)
class _Runs:
    """The conditions of all runs; `plain` is the step with gradients in place of updates."""

    metadata: TrainingMetadata
    planned: PlannedStep
    plain: PlannedStep
    feeds: Mapping[str, Array]
    settings: SessionSettings
    runs: int
    folder: Path
    progress: Callable[[str], None]

    @property
    def _in_place(self) -> dict[str, str]:
        updates = self.planned.step.updates
        return {} if updates is None else dict(updates.replaced)

    @property
    def _plain_feeds(self) -> dict[str, Array]:
        if self.planned.step.updates is None:
            return dict(self.feeds)
        fed = self.plain.step.graph.resident
        return {name: value for name, value in self.feeds.items() if name in fed}

    @property
    def _plain_file(self) -> Path:
        return self.folder / "gradients.onnx"

    def run(
        self,
        file: str | os.PathLike[str],
        *,
        keep_outputs: bool | list[str] = True,
        settings: SessionSettings | None = None,
    ) -> Measurement:
        return measure(
            file,
            self.feeds,
            settings=settings or self.settings,
            runs=self.runs,
            keep_outputs=keep_outputs,
            in_place=self._in_place,
        )

    def run_baseline(self) -> tuple[Measurement, Mapping[str, Array]]:
        """Run the baseline; returns its measurement, and the outputs of the step with gradients."""
        self.progress("emitting the baseline")
        file = self.folder / "regular.onnx"
        _write_baseline(self.planned, self.metadata, file)
        self.progress("running the baseline")
        try:
            baseline = self.run(file)
            if self.planned.step.updates is None:
                return baseline, baseline.outputs
            _write_baseline(self.plain, self.metadata, self._plain_file)
            return baseline, self._run_plain(self._plain_file, self._plain_feeds, keep_outputs=True)
        except RuntimeFailedError as error:
            # The file no longer exists when the error is read.
            raise RuntimeFailedError(str(error).replace(f"'{file}'", "the baseline")) from error

    def _run_plain(
        self, file: str | os.PathLike[str], feeds: Mapping[str, Array], *, keep_outputs: bool | list[str]
    ) -> Mapping[str, Array]:
        return measure(file, feeds, settings=self.settings, runs=1, keep_outputs=keep_outputs).outputs

    def run_by_default(self, training: str | os.PathLike[str]) -> Measurement | RuntimeFailedError:
        settings = SessionSettings(file_order=False, threads=self.settings.threads)
        try:
            return self.run(training, keep_outputs=[self.metadata.loss], settings=settings)
        except RuntimeFailedError as error:
            return error

    def shift_parameters(
        self, training: str | os.PathLike[str], gradients: Mapping[str, Array], seed: int
    ) -> ParameterShift:
        """Move the parameters whose gradients vanish, and measure the change of the loss."""
        small = vanishing_gradients(self.plain, gradients)
        if not small:
            return ParameterShift(())
        self.progress("moving the parameters whose gradients vanish")
        moves = _moves(small, self.metadata, self.feeds, seed)
        feeds = {**self._plain_feeds, **{name: moved for name, (_, moved) in moves.items()}}
        file = training if self.planned.step.updates is None else self._plain_file
        moved = self._run_plain(file, feeds, keep_outputs=[self.metadata.loss])
        change = float(moved[self.metadata.loss]) - float(gradients[self.metadata.loss])
        distance = float(np.sqrt(sum(np.sum((new - old) ** 2) for old, new in moves.values())))
        return ParameterShift(small, change, distance)


def _write_baseline(planned: PlannedStep, metadata: TrainingMetadata, file: Path) -> None:
    model = emit(planned, schedule=store_all_schedule(planned), values=metadata.values).model
    write_model(model, file)


def _planned_like(model: str | os.PathLike[str] | onnx.ModelProto, metadata: TrainingMetadata) -> PlannedStep:
    shapes = {value.name: _shape(value) for value in metadata.proto.graph.input}
    loss = metadata.options.loss_proto
    given = {*draft_of(*load_proto(model)).inputs, *(value.name for value in (loss.graph.input if loss else ()))}
    read = read_with_options(model, metadata.options, {name: shapes[name] for name in shapes if name in given})
    planned = step_with_plan(
        read,
        metadata.plan,
        keep_outputs=metadata.options.keep_outputs,
        optimizer=metadata.options.optimizer,
        is_transferable=False,
    )
    outputs = [value.name for value in metadata.proto.graph.output]
    different = set(planned.step.graph.outputs) ^ set(outputs)
    missing = [name for name in read.inputs if name not in shapes]
    if different or missing:
        name = min(different) if different else missing[0]
        raise ModelFileError(
            f"the training file belongs to another model: only one of the two contains the tensor '{name}'; "
            "give the model that it was made from"
        )
    return planned


def _without_optimizer(planned: PlannedStep, metadata: TrainingMetadata) -> PlannedStep:
    """The same step with gradients in place of updates, under the baseline's plan."""
    everything = CheckpointPlan(planned.traced.problem.graph.vertices, keeps_last_segment=False)
    return step_with_plan(planned.model, everything, keep_outputs=metadata.options.keep_outputs)


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _feeds(planned: PlannedStep, metadata: TrainingMetadata, drawn: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """Inputs, labels and targets by seed; drawn weights where the file stores a repeated value."""
    fed = {value.name for value in metadata.proto.graph.input}
    feeds = feeds_of(planned, seed)
    if not metadata.options.stores_state:
        feeds |= {name: value for name, value in metadata.values.items() if name in fed}
    constant = {name for name, value in metadata.values.items() if value.size > 1 and np.all(value == value.flat[0])}
    feeds.update((name, value) for name, value in drawn.items() if name in fed and name in constant)
    return feeds_of_updates(planned, metadata.values, seed) | feeds


def _moves(
    names: tuple[str, ...], metadata: TrainingMetadata, feeds: Mapping[str, Array], seed: int
) -> dict[str, tuple[Array, Array]]:
    """Values of some parameters, and moved values near them.

    Values other than zero keep their sign: a scale before a normalisation has no effect only while it is
    positive.
    """
    generator = np.random.default_rng(seed)
    values = {name: feeds[name] if name in feeds else metadata.values[name] for name in names}
    moves: dict[str, tuple[Array, Array]] = {}
    for name, value in values.items():
        step = generator.standard_normal(value.shape)
        moved = np.where(value == 0, step, value * np.exp(0.2 * step)).astype(value.dtype)
        moves[name] = (value, moved)
    return moves
