"""Training a model on ONNX Runtime within the simulated peak of its plan."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import onnx

from onnxgc.emission.atomic_files import check_model_writable, write_model
from onnxgc.emission.contract import contract_of
from onnxgc.errors import OutputFileError, TrainingError
from onnxgc.tracing.optimizers import optimizer_as_json
from onnxgc.training.data import ArrayData, Batch, Data, samples_of
from onnxgc.training.deployment import check_apart, has_external_data
from onnxgc.training.evaluation import Metric
from onnxgc.training.state import RunState, check_resumable, load_state, save_state
from onnxgc.training.state_lock import held_alone
from onnxgc.training.stepper import Stepper
from onnxgc.training.workers import Workers


class StopTraining(Exception):  # noqa: N818
    """Raised by a callback to end the run normally."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run.

    Attributes:
        kind: `update`, `epoch`, or `unsaved` if the state could not be written; the run then continues.
        epoch: the current epoch, from 1.
        updates: updates since the beginning of the run.
        of_updates: updates of an epoch, if known.
        loss: mean over the samples of the update or epoch.
        learning_rate: the rate of the last update.
        seconds: duration of the epoch so far.
        samples: samples of the epoch so far.
        metrics: results of the evaluation after an epoch.
        message: the reason of an `unsaved` event.
    """

    kind: str
    epoch: int
    updates: int
    of_updates: int | None
    loss: float
    learning_rate: float
    seconds: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    message: str = ""


Notify: TypeAlias = Callable[[Event], None]


class Trainer(Stepper):
    """Trains a model with its training file, updating parameters and the optimizer's state in place.

    Args:
        source: a forward model in any form that `optimize` accepts, or a training file with an optimizer.
        model: for a training file, the forward model, which evaluation and export need.
        optimizer: adamw (the default), sgd, adam, rmsprop, adagrad, lion, or one with settings.
        learning_rate: a number or a function of the number of previous updates; may be assigned later.
        batch: samples of a step, for a forward model.
        accumulate: steps whose mean gradient makes one update.
        workers: processes that train together, such as `onnxgc.torch.torch_workers.TorchWorkers`.
        provider: cpu or cuda; by default cuda where the machine has it.
        threads: threads of ONNX Runtime; by default its own choice.
        cuda_graph: on cuda, whether steps replay the kernels of the first one.
        seed: seed of weights that the file does not store, of draws and of shuffling; 0 by default.
        progress: called with the name of each stage of planning.
        options: options of `optimize` for a forward model, such as `budget`, `loss` or `freeze`.

    Raises:
        OnnxgcError: one line with the problem, its place and a remedy.
    """

    # -- a run -------------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        *,
        validation: Any = None,
        shuffle: bool = True,
        state: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        resume: bool = False,
        callbacks: Sequence[Callable[[Event], None]] = (),
        metrics: Mapping[str, Metric] | None = None,
    ) -> list[dict[str, Any]]:
        """Trains for `epochs` epochs (with `resume` in total) and returns the figures of all epochs.

        `data` is an `.npz` file, a mapping of arrays or a tuple of them (all samples), a re-iterable of
        batches or a function that returns one. The run is saved to the file `state` after each epoch and
        after every `save_every` updates; with `resume` it continues from that file if it exists. If it cannot
        be written, the run continues and callbacks are invoked with an `unsaved` event. `metrics` are those of
        `evaluate`, on the validation data.

        Raises:
            TrainingError: data do not fit, the loss is not finite, or another run uses the state.
        """
        if state is None and (resume or save_every is not None):
            which = "resume" if resume else "save_every"
            raise TrainingError(f"{which} needs a state file; pass state")
        if epochs < 1 or (save_every is not None and save_every < 1):
            raise TrainingError("epochs and save_every must be at least 1")
        with held_alone(state) if state is not None and self._saves else nullcontext():
            return self._fit(data, epochs, (validation, metrics), shuffle, state, save_every, resume, callbacks)

    def _fit(
        self,
        data: Any,
        epochs: int,
        validation: tuple[Any, Mapping[str, Metric] | None],
        shuffle: bool,
        state: str | os.PathLike[str] | None,
        save_every: int | None,
        resume: bool,
        callbacks: Sequence[Callable[[Event], None]],
    ) -> list[dict[str, Any]]:
        batches = self._data(data, shuffle)
        self._order = {"samples": batches.samples, "shuffle": shuffle} if isinstance(batches, ArrayData) else {}
        if resume and state is not None and os.path.exists(state):
            self.load(state)
            batches = self._data(data, shuffle)
        elif self._position.batches:
            # An epoch that an error or a callback ended is not continued.
            self._position = self._position.at_epoch(self._position.epoch, self._position.history)

        def notify(event: Event) -> None:
            for callback in callbacks:
                callback(event)

        until = epochs if resume else self._position.epoch + epochs
        try:
            while self._position.epoch < until:
                self._epoch(batches, validation, state, save_every, notify)
        except StopTraining:
            self._save_or_notify(state, self._event("update", 0.0, 0.0, None), notify)
        return [dict(entry) for entry in self._position.history]

    def _epoch(
        self,
        batches: Data,
        validation: tuple[Any, Mapping[str, Metric] | None],
        state: str | os.PathLike[str] | None,
        save_every: int | None,
        notify: Notify,
    ) -> None:
        epoch = self._position.epoch
        started = time.perf_counter()
        rate = self._rate(max(0, self._position.updates - 1))
        of_updates = batches.updates(self._accumulate)
        for parts in self._groups(batches.epoch(epoch, self._position.batches)):
            rate = self._rate(self._position.updates)
            loss = self._step(parts)
            # All workers have equally many.
            size = self._workers.count * sum(samples_of(part, self._file) for part in parts)
            self._position = self._position.after(len(parts), size, loss)
            event = self._event("update", loss, rate, of_updates, time.perf_counter() - started)
            if save_every and self._position.updates % save_every == 0:
                self._save_or_notify(state, event, notify)
            notify(event)
        samples = self._position.samples
        if not samples:
            raise TrainingError(
                f"no batch of epoch {epoch + 1} has the {self._file.batch} samples of a step; give more data "
                "or a smaller batch"
            )
        seconds = time.perf_counter() - started
        metrics = {} if validation[0] is None else self.evaluate(*validation)
        mean = self._position.losses / samples
        entry = {
            "epoch": epoch + 1,
            "updates": self._position.updates,
            "loss": mean,
            "samples": samples,
            "seconds": seconds,
            "learning_rate": rate,
            **{f"validation_{name}": value for name, value in metrics.items()},
        }
        history = (*self._position.history, entry)
        self._position = self._position.at_epoch(epoch + 1, history)
        event = Event("epoch", epoch + 1, self._position.updates, of_updates, mean, rate, seconds, samples, metrics)
        self._save_or_notify(state, event, notify)
        notify(event)

    def _event(self, kind: str, loss: float, rate: float, of_updates: int | None, seconds: float = 0.0) -> Event:
        """An event within an epoch."""
        position = self._position
        return Event(kind, position.epoch + 1, position.updates, of_updates, loss, rate, seconds, position.samples)

    def _save_or_notify(self, state: str | os.PathLike[str] | None, event: Event, notify: Notify) -> None:
        if state is None or not self._saves:
            return
        try:
            self.save(state)
        except OutputFileError as error:
            notify(replace(event, kind="unsaved", message=str(error)))

    @property
    def _saves(self) -> bool:
        """Whether this process writes the state."""
        return self._workers.rank == 0

    def _groups(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        """Batches in groups of one update each, without smaller batches if the forward model is unknown."""
        parts: list[Batch] = []
        for batch in batches:
            if self._source.model is None and samples_of(batch, self._file) < self.batch:
                continue
            parts.append(self._checked(batch))
            if len(parts) == self._accumulate:
                yield parts
                parts = []
        if parts:
            yield parts

    # -- state and deployment ----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the run: parameters, the optimizer's states, statistics and the position.

        Raises:
            OutputFileError: the file cannot be written; an existing file is unchanged.
            TrainingError: a parameter is not finite.
        """
        self._check_finite("saved")
        save_state(self._state(), path)

    def _state(self) -> RunState:
        workers = self._workers.count
        settings = {
            "loss": self._file.loss_kind,
            "samples of an update": self.batch * self._accumulate * workers,
            "accumulate": self._accumulate,
            "workers": workers,
            **self._order,
        }
        arrays = {name: self._engine.arrays.array(name) for name in self._engine.kept}
        position = replace(self._position, batch=self.batch)
        contract = None if self._engine.accumulates else contract_of(self._file.graph)
        return RunState(position, arrays, optimizer_as_json(self._source.optimizer), settings, contract)

    def _check_finite(self, what: str) -> None:
        """Prevents non-finite parameters from overwriting good ones in a file."""
        for name in self._engine.parameters:
            if not np.isfinite(self._engine.arrays.array(name)).all():
                raise TrainingError(
                    f"parameter '{name}' is not finite after {self._position.updates} updates, and is not "
                    f"{what}; return to an earlier state, and lower the learning rate or clip gradients"
                )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Resumes from a saved state, or from the state file of a training file, as another program left it.

        Raises:
            TrainingError: the file is not a state, or belongs to another model or optimizer.
        """
        state = load_state(path)
        drawn = tuple(self._source.drawn)
        check_resumable(state, self._state(), os.fspath(path), seed=self._seed, drawn=drawn)
        for name in self._engine.kept:
            self._engine.arrays.put(name, state.arrays[name])
        self._engine.forget_sums()
        self._position = state.position if state.is_run else replace(state.position, seed=self._position.seed)

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The forward model's file with the trained weights and statistics, for deployment.

        Names, opset and metadata are unchanged. The model is written if a path is given.

        Raises:
            OutputFileError: the file cannot be written.
            TrainingError: the forward model was not given, or its file lacks the weights.
        """
        if path is not None:
            check_model_writable(path)
            check_apart(self._source.model, path)
        self._check_finite("exported")
        names = (*self._engine.parameters, *self._file.statistics)
        deployed = self._source.deployed({name: self._engine.arrays.array(name) for name in names})
        if path is not None:
            write_model(deployed, path, external_data=has_external_data(self._source.model))
        return deployed


__all__ = ["Event", "StopTraining", "Trainer", "Workers"]
