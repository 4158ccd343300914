"""Training a model on ONNX Runtime, in the memory that its plan promises."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import onnx

from onnxgc.emission.write import check_model_writable, write_model
from onnxgc.errors import OutputFileError, TrainingError
from onnxgc.model.core.ir import Array
from onnxgc.model.files.load import load_proto, source_of
from onnxgc.runtime.io_binding import DeviceArrays
from onnxgc.runtime.ort import default_providers
from onnxgc.tracing.optimizers import (
    KEEP,
    LEARNING_RATE,
    SGD,
    STEP,
    AdamW,
    optimizer_as_json,
    optimizer_of,
)
from onnxgc.training.data import (
    IGNORED_LABEL,
    ArrayData,
    Batch,
    Data,
    IteratedData,
    arrays_for,
    checked,
    named,
    read_arrays,
    samples_of,
)
from onnxgc.training.engine import Engine
from onnxgc.training.files import DRAW, LOSS_SCALE, is_training_file
from onnxgc.training.learning_rates import Schedule, constant
from onnxgc.training.lock import held_alone
from onnxgc.training.source import Source
from onnxgc.training.state import Position, RunState, load_state, save_state

_PROVIDERS = ("cpu", "cuda")
_OF_A_RUN = ("loss", "samples of an update")
"""Settings that a run has from beginning to end; within an epoch it has more."""


class StopTraining(Exception):  # noqa: N818
    """Raised by a callback to end the run as if it were done."""


@dataclass(frozen=True, slots=True)
class Event:
    """What has happened in a run: `update`, `epoch` or `unsaved`, and the figures of it.

    `updates` counts from the run's beginning and `epoch` from 1; `of_updates` is how many an epoch has,
    where that is known. `loss` is the mean of the update's or epoch's samples, `seconds` and
    `samples` are of the epoch so far. `metrics` are those of the evaluation behind an epoch. An `unsaved` run
    goes on, and `message` says why its state could not be written.
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


class Workers(Protocol):
    """Several processes that train together."""

    rank: int
    count: int

    def total(self, value: float) -> float:
        """The sum of a number over all."""
        ...

    def add_up(self, arrays: DeviceArrays, names: Sequence[str]) -> None:
        """Have each array hold the sum over all."""
        ...


class Trainer:
    """Trains a model by its training file, with parameters and the optimizer's state in place.

    `source` is a forward model in any form that `optimize` takes, or a training file with an optimizer in it
    (then `model` is the forward model, which is asked for to evaluate and to export). `optimizer` is
    sgd, adamw (the default), or either with its settings. For a forward model
    `batch` is the number of samples of a step, and `options` are those of `optimize`, such as `budget`,
    `loss` or `freeze`. `learning_rate` is a number, or a function of the number of updates made before; it
    may be assigned later, as nothing else may. Weights that the file does not store are drawn from `seed`,
    by default 0. With `accumulate` each update takes the mean
    gradient of so many steps. `provider` is cpu or cuda, by default what the machine has.

    Raises:
        OnnxgcError: one line that says what is wrong, where and what to do.
    """

    def __init__(
        self,
        source: Any,
        *,
        model: Any = None,
        optimizer: SGD | AdamW | str | None = None,
        learning_rate: float | Schedule = 1e-3,
        batch: int | None = None,
        accumulate: int = 1,
        workers: Workers | None = None,
        provider: str | None = None,
        threads: int | None = None,
        seed: int | None = None,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        if accumulate < 1:
            raise TrainingError(f"gradients of {accumulate} steps cannot be accumulated; give at least 1")
        self._providers, device = _providers_of(provider)
        self._accumulate = accumulate
        self._workers = workers
        self._schedule = _schedule_of(learning_rate)
        self._seed = seed
        self._position = Position(seed=seed or 0)
        tell = progress or (lambda stage: None)
        accumulates = accumulate > 1 or workers is not None
        given = source_of(source)
        if is_training_file(given if isinstance(given, onnx.ModelProto) else load_proto(given)[0]):
            if options or batch is not None or accumulates or optimizer is not None:
                left = [
                    *options,
                    *(["optimizer"] if optimizer is not None else []),
                    *(["batch"] if batch is not None else []),
                    *(["accumulate"] if accumulate > 1 else []),
                    *(["workers"] if workers is not None else []),
                ]
                raise TrainingError(
                    f"a training file is planned already; leave out {', '.join(left)}, or give the forward "
                    "model"
                )
            self._source = Source.of_file(given, None if model is None else source_of(model))
        elif model is not None:
            raise TrainingError("two forward models are given; give one, or a training file and its model")
        else:
            chosen = optimizer_of("adamw" if optimizer is None else optimizer)
            if not isinstance(chosen, SGD | AdamW):
                raise TrainingError("training needs an optimizer: sgd or adamw")
            tell("planning")
            self._source = Source.of_model(
                given,
                chosen,
                accumulates=accumulates,
                batch=batch,
                seed=seed or 0,
                tell=tell,
                options=options,
            )
        self._order: Mapping[str, Any] = {}
        self._file = self._source.file
        self._engine = Engine(self._source, providers=self._providers, device=device, threads=threads)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuses what would be set without effect."""
        if not name.startswith("_") and name != "learning_rate":
            raise TrainingError(
                f"'{name}' of a Trainer cannot be changed, only learning_rate can; make a new Trainer "
                f"with another {name}"
            )
        super().__setattr__(name, value)

    # -- one step ----------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the next update; a number or a function of the updates before may be assigned."""
        return self._rate(self._position.updates)

    @learning_rate.setter
    def learning_rate(self, rate: float | Schedule) -> None:
        self._schedule = _schedule_of(rate)

    @property
    def batch(self) -> int:
        """How many samples a step takes."""
        return self._file.batch

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """What a step takes, in order: the model's inputs and the target, with their shapes."""
        return {name: self._file.types[name].shape for name in self._file.fed}

    @property
    def updates(self) -> int:
        """How many updates were made."""
        return self._position.updates

    @property
    def report(self) -> Mapping[str, Any]:
        """What `optimize` said of the model; nothing of a training file."""
        return self._source.report

    @property
    def simulated_peak_bytes(self) -> int:
        """What a step holds at once: its own tensors, and the optimizer's state."""
        return self._file.simulated_peak_bytes + self._engine.state_bytes

    def described(self) -> dict[str, Any]:
        """What is trained and how, as figures."""
        parameters = self._engine.parameters
        return {
            "parameters": sum(self._file.types[name].element_count for name in parameters),
            "tensors": len(parameters),
            "optimizer": self._source.optimizer.name,
            "loss": self._file.loss_kind,
            "batch": self.batch,
            "accumulate": self._accumulate,
            "provider": self._providers[0],
            "state_bytes": self._engine.state_bytes,
            "simulated_peak_bytes": self.simulated_peak_bytes,
        }

    def updates_of(self, data: Any) -> int | None:
        """How many updates an epoch over these data has, where it is known."""
        return self._data(data, shuffle=True).updates(self._accumulate)

    def addresses(self) -> dict[str, int]:
        """Where each parameter and state lies; it stays there."""
        engine = self._engine
        return {name: engine.arrays.address(name) for name in (*engine.parameters, *engine.states)}

    def array(self, name: str) -> Array:
        """A copy of a parameter, a state or a running statistic.

        Raises:
            TrainingError: there is none of that name.
        """
        if name not in self._engine.arrays:
            raise TrainingError(f"'{name}' is no parameter, state or statistic of this run")
        return np.array(self._engine.arrays.array(name))

    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters, by name."""
        return {name: self.array(name) for name in self._engine.parameters}

    def step(self, batch: Any) -> float:
        """One update by one batch, or by a list of as many as are accumulated; returns the mean loss.

        Raises:
            TrainingError: the batch does not fit, or the loss is no number.
        """
        parts = batch if isinstance(batch, list) and self._accumulate > 1 else [batch]
        if not 1 <= len(parts) <= self._accumulate:
            raise TrainingError(f"{len(parts)} batches are given, and an update takes {self._accumulate}")
        return self._step([self._checked(named(part, self._file.fed)) for part in parts])

    def _step(self, parts: Sequence[Batch]) -> float:
        sizes = [samples_of(part, self._file) for part in parts]
        total = self._over_all(float(sum(sizes)))
        scalars: dict[str, Array] = {
            LEARNING_RATE: np.asarray(self._rate(self._position.updates), np.float32),
            STEP: np.asarray(self._position.updates + 1, np.int64),
        }
        mean = 0.0
        for place, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            scalars[KEEP] = np.asarray(float(place > 0), np.float32)
            scalars[DRAW] = np.asarray(self._next_draw(), np.int64)
            if self._engine.accumulates:
                scalars[LOSS_SCALE] = np.asarray(size / total, np.float32)
            mean += self._engine.step(part, scalars, size) * size / total
        mean = self._over_all(mean)
        # Before parameters take anything of it over, where gradients are added up first.
        self._check_loss(mean)
        if self._workers is not None:
            self._workers.add_up(self._engine.arrays, self._engine.sums)
        self._engine.update(scalars)
        self._position = replace(self._position, updates=self._position.updates + 1)
        return mean

    def _rate(self, updates: int) -> float:
        """The learning rate behind so many updates."""
        found = self._schedule(updates)
        try:
            return _rate(float(found))
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"the learning rate of update {updates + 1} is {found!r}, which is no number"
            ) from error

    def _over_all(self, value: float) -> float:
        return value if self._workers is None else self._workers.total(value)

    def _next_draw(self) -> int:
        rank, count = (0, 1) if self._workers is None else (self._workers.rank, self._workers.count)
        draw = self._position.draws * count + rank
        self._position = replace(self._position, draws=self._position.draws + 1)
        return draw

    def _check_loss(self, loss: float) -> None:
        if np.isfinite(loss):
            return
        told = "the parameters are spoilt"
        if self._engine.accumulates:
            self._engine.forget_sums()
            told = "the parameters are as they were before it"
            told += ", but not the running statistics" if self._file.statistics else ""
        raise TrainingError(
            f"the loss is {loss} in update {self._position.updates + 1}, and {told}; go back to a saved "
            "state, and lower the learning rate, warm it up, or clip gradients"
        )

    def _checked(self, batch: Batch) -> Batch:
        """A batch in the types of the inputs.

        Raises:
            TrainingError: shapes, types or labels do not fit.
        """
        found = checked(batch, self._file)
        size = samples_of(found, self._file)
        if size != self.batch and self._source.model is None:
            raise TrainingError(
                f"the batch has {size} samples, and the training file takes {self.batch}; give its forward "
                "model as well, which can be planned for another batch"
            )
        return found

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
    ) -> list[dict[str, Any]]:
        """Train for so many epochs, with `resume` in all; returns the figures of each, earlier ones included.

        `data` is an `.npz` file, a mapping of arrays or a tuple of them (all samples), a re-iterable of
        batches or a function that returns one. `state` is a file that the run is saved to after each epoch,
        and after every `save_every` updates; with `resume` a run goes on from it where it is there. Where it
        cannot be written, the run goes on and callbacks hear of it.

        Raises:
            TrainingError: data do not fit, the loss is no number, or another run is at work on the state.
        """
        if state is None and (resume or save_every is not None):
            which = "resume" if resume else "save_every"
            raise TrainingError(f"{which} needs a file to keep the run in; give state as well")
        if epochs < 1 or (save_every is not None and save_every < 1):
            raise TrainingError("epochs and save_every must be at least 1")
        with held_alone(state) if state is not None and self._saves else nullcontext():
            return self._fit(data, epochs, validation, shuffle, state, save_every, resume, callbacks)

    def _fit(
        self,
        data: Any,
        epochs: int,
        validation: Any,
        shuffle: bool,
        state: str | os.PathLike[str] | None,
        save_every: int | None,
        resume: bool,
        callbacks: Sequence[Callable[[Event], None]],
    ) -> list[dict[str, Any]]:
        batches = self._data(data, shuffle)
        self._order = _order_of(batches)
        if resume and state is not None and os.path.exists(state):
            self.load(state)
            batches = self._data(data, shuffle)
        elif self._position.batches:
            # What an error or a callback has ended is not gone on with.
            self._position = self._position.at_epoch(self._position.epoch, self._position.history)
        tell = _Told(callbacks)
        until = epochs if resume else self._position.epoch + epochs
        try:
            while self._position.epoch < until:
                self._epoch(batches, validation, state, save_every, tell)
        except StopTraining:
            self._save_or_tell(state, self._event("update", 0.0, 0.0, None), tell)
        return [dict(entry) for entry in self._position.history]

    def _epoch(
        self,
        batches: Data,
        validation: Any,
        state: str | os.PathLike[str] | None,
        save_every: int | None,
        tell: _Told,
    ) -> None:
        epoch = self._position.epoch
        started = time.perf_counter()
        rate = self._rate(max(0, self._position.updates - 1))
        of_updates = batches.updates(self._accumulate)
        for parts in self._grouped(batches.epoch(epoch, self._position.batches)):
            rate = self._rate(self._position.updates)
            loss = self._step(parts)
            # All workers have as many.
            count = 1 if self._workers is None else self._workers.count
            size = count * sum(samples_of(part, self._file) for part in parts)
            self._position = self._position.after(len(parts), size, loss)
            event = self._event("update", loss, rate, of_updates, time.perf_counter() - started)
            if save_every and self._position.updates % save_every == 0:
                self._save_or_tell(state, event, tell)
            tell(event)
        samples = self._position.samples
        if not samples:
            raise TrainingError(
                f"no batch of epoch {epoch + 1} has the {self._file.batch} samples that a step takes; give "
                "more data or a smaller batch"
            )
        seconds = time.perf_counter() - started
        metrics = {} if validation is None else self.evaluate(validation)
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
        event = Event(
            "epoch", epoch + 1, self._position.updates, of_updates, mean, rate, seconds, samples, metrics
        )
        self._save_or_tell(state, event, tell)
        tell(event)

    def _event(
        self, kind: str, loss: float, rate: float, of_updates: int | None, seconds: float = 0.0
    ) -> Event:
        """An event in the middle of an epoch."""
        position = self._position
        return Event(
            kind, position.epoch + 1, position.updates, of_updates, loss, rate, seconds, position.samples
        )

    def _save_or_tell(self, state: str | os.PathLike[str] | None, event: Event, tell: _Told) -> None:
        if state is None or not self._saves:
            return
        try:
            self.save(state)
        except OutputFileError as error:
            tell(replace(event, kind="unsaved", message=str(error)))

    @property
    def _saves(self) -> bool:
        """Whether it is this process that writes the state."""
        return self._workers is None or not self._workers.rank

    def _grouped(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        """As many batches as an update takes; of those of another size only what can be run."""
        parts: list[Batch] = []
        for batch in batches:
            if self._source.model is None and samples_of(batch, self._file) < self.batch:
                # The rest of an epoch, where nothing is known but the file.
                continue
            parts.append(self._checked(batch))
            if len(parts) == self._accumulate:
                yield parts
                parts = []
        if parts:
            yield parts

    def _data(self, given: Any, shuffle: bool, *, is_shared: bool = True) -> Data:
        """What was given as batches, `is_shared` among all workers."""
        file = self._file
        rank, count = (
            (self._workers.rank, self._workers.count) if self._workers is not None and is_shared else (0, 1)
        )
        if isinstance(given, str | os.PathLike):
            given = read_arrays(given)
        if isinstance(given, tuple) and all(hasattr(part, "shape") for part in given):
            given = named(given, file.fed)
        if isinstance(given, Mapping):
            arrays, fixed = arrays_for(given, file)
            return ArrayData(arrays, file.batch, shuffle, self._position.seed, rank, count, fixed)
        if callable(given):
            return IteratedData(given, file.fed, rank, count)
        if isinstance(given, Iterable):
            return IteratedData(lambda: given, file.fed, rank, count)
        raise TrainingError(
            f"data are a {type(given).__name__}; give an .npz file, arrays by input names, or batches"
        )

    # -- evaluation --------------------------------------------------------------------------------

    def evaluate(self, data: Any) -> dict[str, float]:
        """The mean loss over all samples in inference mode, and for cross-entropy the accuracy.

        Raises:
            TrainingError: the forward model was not given, or data do not fit.
        """
        file = self._file
        losses = weights = 0.0
        right = counted = 0
        for batch in self._data(data, shuffle=False, is_shared=False).epoch(0):
            found = checked(batch, file)
            size = samples_of(found, file)
            evaluation = self._engine.evaluation(size)
            session = evaluation.session
            session.run(found)
            weight = size
            if file.classes is not None and file.target in found:
                labels = found[file.target]
                kept = labels != IGNORED_LABEL
                weight = int(kept.sum())
                scores = session.result(evaluation.outputs[0])
                if scores.ndim > labels.ndim + 1:
                    # As the loss has them: without dimensions of 1.
                    scores = scores.reshape(len(scores), -1)
                chosen = scores.argmax(file.class_axis).reshape(labels.shape)
                right += int((chosen == labels)[kept].sum())
                counted += weight
            if weight:
                losses += float(session.result(evaluation.loss)) * weight
            weights += weight
        figures = {"loss": losses / weights if weights else float("nan")}
        if counted:
            figures["accuracy"] = right / counted
        return figures

    # -- state and deployment ----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run's state: parameters, the optimizer's states, statistics, and how far it is.

        Raises:
            OutputFileError: it cannot be written; an earlier file of that name is untouched.
            TrainingError: a parameter is not finite.
        """
        self._check_finite("saved")
        arrays = {name: self._engine.arrays.array(name) for name in self._engine.kept}
        position = replace(self._position, batch=self.batch)
        optimizer = optimizer_as_json(self._source.optimizer)
        save_state(RunState(position, arrays, optimizer, self._settings()), path)

    def _settings(self) -> dict[str, Any]:
        """What a run that goes on must have as well, beside its optimizer; inside of an epoch all of it."""
        workers = 1 if self._workers is None else self._workers.count
        return {
            "loss": self._file.loss_kind,
            "samples of an update": self.batch * self._accumulate * workers,
            "accumulate": self._accumulate,
            "workers": workers,
            **self._order,
        }

    def _check_finite(self, what: str) -> None:
        """Refuses to have spoilt parameters take the place of good ones in a file."""
        for name in self._engine.parameters:
            if not np.isfinite(self._engine.arrays.array(name)).all():
                raise TrainingError(
                    f"parameter '{name}' is not finite after {self._position.updates} updates, and is not "
                    f"{what}; go back to an earlier state, and lower the learning rate or clip gradients"
                )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a state that was saved.

        Raises:
            TrainingError: the file is none, or is of another model or optimizer.
        """
        state = load_state(path)
        name = os.fspath(path)
        kept, arrays = self._engine.kept, self._engine.arrays
        missing = [key for key in kept if key not in state.arrays]
        unknown = [key for key in state.arrays if key not in kept]
        if missing or unknown:
            what = f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}', which this run has not"
            raise TrainingError(
                f"the state '{name}' {what}; give the state of a run of this model and optimizer"
            )
        given = optimizer_as_json(self._source.optimizer)
        if json.loads(json.dumps(given)) != state.optimizer:
            raise TrainingError(
                f"the state '{name}' was made with the optimizer {_told(state.optimizer)}, and this run has "
                f"{_told(given)}; give the same settings, or begin from exported weights"
            )
        self._check_same(name, state)
        for key in kept:
            array, here = state.arrays[key], arrays.array(key)
            if array.shape != here.shape or array.dtype != here.dtype:
                raise TrainingError(
                    f"'{key}' is {array.dtype.name} {list(array.shape)} in the state '{name}', and "
                    f"{here.dtype.name} {list(here.shape)} in this run"
                )
        for key in kept:
            arrays.put(key, state.arrays[key])
        self._engine.forget_sums()
        self._position = state.position

    def _check_same(self, name: str, state: RunState) -> None:
        """Refuses a state that this run would go on from in another way than it was begun."""
        position = state.position
        here: dict[str, Any] = {"batch": self.batch, **self._settings()}
        made = {"batch": position.batch or self.batch, **state.settings}
        # What a state of an earlier version does not say is taken for the same.
        compared = here if position.batches else _OF_A_RUN if state.settings else ("batch",)
        for key in compared:
            if made.get(key, here[key]) != here[key]:
                raise TrainingError(
                    f"the state '{name}' was made with {key} {made[key]}, and this run has {key} {here[key]}"
                    "; go on with the same, or begin from exported weights"
                )
        if self._seed is not None and self._seed != position.seed:
            raise TrainingError(
                f"the state '{name}' was made with seed {position.seed}, and this run has seed {self._seed}; "
                "leave the seed out, or give the same"
            )
        drawn = [key for key in self._source.drawn if key not in state.arrays]
        if drawn and self._position.seed != position.seed:
            raise TrainingError(
                f"the state '{name}' was made with seed {position.seed}, from which '{drawn[0]}' was drawn, "
                "which is not trained; give the same seed"
            )

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The forward model's own file with the trained weights and statistics, to deploy.

        Names, opset and metadata stay. It is written where a path is given.

        Raises:
            OutputFileError: the file cannot be written.
            TrainingError: the forward model was not given, or its file has no place for the weights.
        """
        if path is not None:
            check_model_writable(path)
            self._source.check_apart(path)
        self._check_finite("exported")
        names = (*self._engine.parameters, *self._file.statistics)
        deployed = self._source.deployed({name: self._engine.arrays.array(name) for name in names})
        if path is not None:
            write_model(deployed, path, external_data=self._source.has_external_data)
        return deployed


class _Told:
    """Callbacks, as one."""

    def __init__(self, callbacks: Sequence[Callable[[Event], None]]) -> None:
        self._callbacks = callbacks

    def __call__(self, event: Event) -> None:
        for callback in self._callbacks:
            callback(event)


def _order_of(data: Data) -> dict[str, Any]:
    """On what the place of a batch in its epoch depends."""
    return {"samples": data.samples, "shuffle": data.shuffle} if isinstance(data, ArrayData) else {}


def _schedule_of(rate: float | Schedule) -> Schedule:
    if callable(rate):
        return rate
    try:
        return constant(_rate(float(rate)))
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"the learning rate is {rate!r}; give a number, or a function of the updates made before"
        ) from error


def _rate(value: float) -> float:
    if not 0 <= value < float(np.finfo(np.float32).max):
        raise TrainingError(f"the learning rate is {value}; it must be a number from 0 on")
    return float(value)


def _told(optimizer: Mapping[str, Any] | None) -> str:
    """An optimizer and its settings on one line."""
    settings = dict(optimizer or {"name": "none"})
    name = settings.pop("name")
    return f"{name} ({', '.join(f'{key} {value}' for key, value in settings.items() if value)})"


def _providers_of(provider: str | None) -> tuple[tuple[str, ...], str]:
    """The providers of a session, and the device that arrays lie on."""
    if provider is None:
        providers = default_providers()
        return providers, "cuda" if "CUDAExecutionProvider" in providers else "cpu"
    if provider not in _PROVIDERS:
        raise TrainingError(f"there is no provider '{provider}'; choose cpu or cuda")
    if provider == "cpu":
        return ("CPUExecutionProvider",), "cpu"
    if "CUDAExecutionProvider" not in default_providers():
        raise TrainingError("this machine has no CUDA device that ONNX Runtime can use; choose cpu")
    return ("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda"


__all__ = ["Event", "StopTraining", "Trainer", "Workers"]
