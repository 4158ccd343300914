"""Training a model on ONNX Runtime, in the memory that its plan promises."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import helper

from onnxgc.api.pipeline import OptimizeResult, ReadOptions, optimize
from onnxgc.emission.updates import update_model
from onnxgc.emission.write import check_model_writable, write_model
from onnxgc.errors import OutputFileError, TrainingError
from onnxgc.model.deployment import Deployment
from onnxgc.model.initialise import draw_weights
from onnxgc.model.ir import Array
from onnxgc.model.load import load_proto, source_of
from onnxgc.model.parameters import Role
from onnxgc.model.read import classified
from onnxgc.runtime.ort import default_providers
from onnxgc.tracing.optimizers import (
    KEEP,
    LEARNING_RATE,
    SGD,
    STEP,
    Accumulation,
    AdamW,
    optimizer_as_json,
    optimizer_of,
)
from onnxgc.training.bound import BoundSession, DeviceArrays
from onnxgc.training.data import (
    ArrayData,
    Batch,
    Data,
    IteratedData,
    arrays_for,
    check_samples,
    converted,
    named,
    read_arrays,
)
from onnxgc.training.evaluation import evaluation_graph, evaluation_model
from onnxgc.training.files import DRAW, TrainingFile, is_training_file
from onnxgc.training.learning_rates import Schedule, constant
from onnxgc.training.state import Position, RunState, load_state, save_state

IGNORED_LABEL = -100
_LOSS_SCALE = "loss_scale"
_DEVICES = {"cpu": "cpu", "cuda": "cuda"}


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
    (then `model` is the forward model, which is asked for to evaluate and to export). For a forward model
    `batch` is the number of samples of a step, and `options` are those of `optimize`, such as `budget`, `loss`
    or `freeze`. `learning_rate` is a number, or a function of the number of updates made before.
    Weights that the file does not store are drawn from `seed`. With `accumulate` each update takes the mean
    gradient of so many steps. `provider` is cpu or cuda, by default what the machine has.

    Raises:
        OnnxgcError: one line that says what is wrong, where and what to do.
    """

    def __init__(
        self,
        source: Any,
        *,
        model: Any = None,
        optimizer: SGD | AdamW | str = "adamw",
        learning_rate: float | Schedule = 1e-3,
        batch: int | None = None,
        accumulate: int = 1,
        workers: Workers | None = None,
        provider: str | None = None,
        threads: int | None = None,
        seed: int = 0,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        if accumulate < 1:
            raise TrainingError(f"gradients of {accumulate} steps cannot be accumulated; give at least 1")
        self._providers, device = _providers_of(provider)
        self._threads = threads
        self._accumulate = accumulate
        self._workers = workers
        self._schedule = learning_rate if callable(learning_rate) else constant(_rate(learning_rate))
        self._position = Position(seed=seed)
        self._arrays = DeviceArrays(device)
        self._sessions: dict[int, BoundSession] = {}
        self._evaluations: dict[int, tuple[BoundSession, tuple[str, ...], str]] = {}
        self._drawn: dict[str, Array] = {}
        self.report: Mapping[str, Any] = {}
        """What `optimize` said, where it was asked."""
        self._tell = progress or (lambda stage: None)
        given = source_of(source)
        proto = given if isinstance(given, onnx.ModelProto) else load_proto(given)[0]
        if is_training_file(proto):
            if options or batch is not None:
                named_options = ", ".join([*options, *(["batch"] if batch is not None else [])])
                raise TrainingError(f"a training file is planned already; leave out {named_options}")
            self._model = None if model is None else source_of(model)
            file = TrainingFile.of(given)
            if not isinstance(file.optimizer, SGD | AdamW):
                raise TrainingError(
                    "the training file has no optimizer; make it with `onnxgc optimize --optimizer adamw`, or "
                    "give the forward model"
                )
            if self._is_split:
                raise TrainingError(
                    "a training file with an optimizer updates in each step; give the forward model to "
                    "accumulate gradients"
                )
            self._optimizer: SGD | AdamW = file.optimizer
            self._options = _options_of(file)
        else:
            if model is not None:
                raise TrainingError(
                    "two forward models are given; give one, or a training file and its model"
                )
            self._model = given
            chosen = optimizer_of(optimizer)
            if not isinstance(chosen, SGD | AdamW):
                raise TrainingError("training needs an optimizer: sgd or adamw")
            self._optimizer = chosen
            result = self._planned(batch, options)
            self._options = replace(result.options, optimizer=None)
            self.report = result.report
            file = TrainingFile.of(result.training_graph.model)
        self._file = file
        self._settings = options
        self._put_initial(file)
        self._trained = tuple(file.states_of)
        self._update = self._update_session() if self._is_split else None
        self._sessions[file.batch] = self._session(file)

    @property
    def _is_split(self) -> bool:
        """Whether gradients are added up in one graph and used in another."""
        return self._accumulate > 1 or self._workers is not None

    def _planned(self, batch: int | None, options: Mapping[str, Any]) -> OptimizeResult:
        """The training graph of a forward model, with the weights that its file does not store drawn."""
        assert self._model is not None
        settings = dict(options)
        shapes = dict(settings.pop("input_shapes", None) or {})
        if batch is not None:
            shapes = {**_shapes_at(self._model, batch), **shapes}
        optimizer = Accumulation() if self._is_split else self._optimizer
        self._tell("planning")
        result = optimize(
            self._model, optimizer=optimizer, input_shapes=shapes, progress=self._tell, **settings
        )
        drawn = draw_weights(result.planned.model, self._position.seed, only_constant_filled=True)
        self._drawn = {**drawn, **result.values}
        return replace(result, values=self._drawn)

    def _put_initial(self, file: TrainingFile) -> None:
        for name, value in file.initial.items():
            self._arrays.put(name, value)
        for name in file.states:
            self._arrays.put_zeros(name, file.types[name])

    # -- sessions ----------------------------------------------------------------------------------

    def _session(self, file: TrainingFile) -> BoundSession:
        fetched = [file.loss, *([file.norm] if file.norm else [])]
        held = [*file.initial, *file.states]
        # A parameter that no gradient reaches is an input all the same.
        replaced = {new: old for pairs in (file.parameters, file.states) for old, new in pairs.items()}
        in_place, beside = _statistics_in_place(file)
        self._beside = beside
        return BoundSession(
            file.graph,
            self._arrays,
            held=held,
            replaced={**replaced, **{new: old for old, new in in_place.items()}},
            fetched={name: file.types[name] for name in (*fetched, *beside.values())},
            providers=self._providers,
            threads=self._threads,
        )

    def _update_session(self) -> BoundSession:
        """The graph that updates parameters by gradients that were added up."""
        types = {name: self._file.types[name] for name in self._file.states_of}
        gradients = {name: states[0] for name, states in self._file.states_of.items()}
        proto, updates = update_model(self._optimizer, types, gradients)
        for name in updates.state_names:
            self._arrays.put_zeros(name, updates.types[name])
        self._state_names = updates.state_names
        self._update_scalars = dict(updates.scalars)
        self._norm = updates.norm
        return BoundSession(
            proto,
            self._arrays,
            held=[*types, *gradients.values(), *updates.state_names],
            replaced=updates.replaced,
            fetched={updates.norm: updates.types[updates.norm]} if updates.norm else {},
            providers=self._providers,
            threads=self._threads,
        )

    def _session_for(self, size: int) -> BoundSession | None:
        """A session that takes so many samples; None where none can be made."""
        if size not in self._sessions:
            if self._model is None:
                return None
            settings = {
                key: value
                for key, value in self._settings.items()
                if key in ("loss", "trainable", "freeze", "freeze_bn", "untie", "keep_outputs")
            }
            optimizer = Accumulation() if self._is_split else self._optimizer
            result = optimize(
                self._model,
                optimizer=optimizer,
                input_shapes=self._shapes(size),
                plan=self._file.plan,
                values=self._drawn,
                check=False,
                **settings,
            )
            self._sessions[size] = self._session(TrainingFile.of(result.training_graph.model))
        return self._sessions[size]

    def _shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        file = self._file
        return {
            name: (size, *file.types[name].shape[1:])
            if file.types[name].shape[:1] == (file.batch,)
            else file.types[name].shape
            for name in file.fed
            if name != file.target
        }

    # -- one step ----------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """How many samples a step takes."""
        return self._file.batch

    @property
    def updates(self) -> int:
        """How many updates were made."""
        return self._position.updates

    @property
    def notes(self) -> tuple[str, ...]:
        """What reading and planning the model had to say."""
        return tuple(self.report.get("notes", ()))

    def updates_of(self, data: Any) -> int | None:
        """How many updates an epoch over these data has, where it is known."""
        return self._data(data, shuffle=True).updates(self._accumulate)

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps, sums of gradients included."""
        states = self._file.states if self._update is None else (*self._file.states, *self._state_names)
        return sum(self._arrays.array(name).nbytes for name in states)

    @property
    def simulated_peak_bytes(self) -> int:
        """What a step holds at once: its own tensors, and the optimizer's state."""
        return self._file.simulated_peak_bytes + self.state_bytes

    def described(self) -> dict[str, Any]:
        """What is trained and how, as figures."""
        return {
            "parameters": sum(self._file.types[name].element_count for name in self._trained),
            "tensors": len(self._trained),
            "optimizer": self._optimizer.name,
            "loss": self._file.loss_kind,
            "batch": self.batch,
            "accumulate": self._accumulate,
            "provider": self._providers[0],
            "state_bytes": self.state_bytes,
            "simulated_peak_bytes": self.simulated_peak_bytes,
        }

    def addresses(self) -> dict[str, int]:
        """Where each parameter and state lies; it stays there."""
        states = self._file.states if self._update is None else self._state_names
        return {name: self._arrays.address(name) for name in (*self._trained, *states)}

    def array(self, name: str) -> Array:
        """A copy of a parameter, a state or a running statistic.

        Raises:
            TrainingError: there is none of that name.
        """
        if name not in self._arrays:
            raise TrainingError(f"'{name}' is no parameter, state or statistic of this run")
        return np.array(self._arrays.array(name))

    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters, by name."""
        return {name: self.array(name) for name in self._trained}

    def step(self, batch: Any) -> float:
        """One update by one batch, or by a list of as many as are accumulated; returns the mean loss.

        Raises:
            TrainingError: the batch does not fit, or the loss is no number.
        """
        parts = batch if isinstance(batch, list) and self._accumulate > 1 else [batch]
        return self._step([self._checked(named(part, self._file.fed)) for part in parts])

    def _step(self, parts: Sequence[Batch]) -> float:
        sizes = [self._size(part) for part in parts]
        total = float(sum(sizes))
        if self._workers is not None:
            total = self._workers.total(total)
        rate = np.asarray(self._schedule(self._position.updates), np.float32)
        number = np.asarray(self._position.updates + 1, np.int64)
        mean = 0.0
        for place, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            session = self._session_for(size)
            assert session is not None, "sizes were checked"
            scalars: dict[str, Array] = {
                LEARNING_RATE: rate,
                STEP: number,
                KEEP: np.asarray(float(place > 0), np.float32),
                DRAW: np.asarray(self._next_draw(), np.int64),
            }
            if self._is_split:
                scalars[_LOSS_SCALE] = np.asarray(size / total, np.float32)
            names = self._file.scalars
            numbers = {names[key]: value for key, value in scalars.items() if key in names}
            session.run({**part, **numbers})
            for old, new in self._beside.items():
                self._arrays.put(old, session.result(new))
            mean += float(session.result(self._file.loss)) * size / total
        if self._workers is not None:
            mean = self._workers.total(mean)
        # Before the parameters take anything of it over, where gradients are added up first.
        self._check_loss(mean)
        if self._update is not None:
            if self._workers is not None:
                names_of_sums = [states[0] for states in self._file.states_of.values()]
                self._workers.add_up(self._arrays, names_of_sums)
            given: dict[str, Array] = {LEARNING_RATE: rate, STEP: number}
            self._update.run({name: given[key] for key, name in self._update_scalars.items()})
        self._position = replace(self._position, updates=self._position.updates + 1)
        return mean

    def _next_draw(self) -> int:
        rank, count = (0, 1) if self._workers is None else (self._workers.rank, self._workers.count)
        draw = self._position.draws * count + rank
        self._position = replace(self._position, draws=self._position.draws + 1)
        return draw

    def _check_loss(self, loss: float) -> None:
        if np.isfinite(loss):
            return
        told = "the parameters are as they were before it" if self._is_split else "the parameters are spoilt"
        raise TrainingError(
            f"the loss is {loss} in update {self._position.updates + 1}, and {told}; go back to a saved "
            "state, and lower the learning rate, warm it up, or clip gradients"
        )

    def _size(self, part: Batch) -> int:
        return len(next(iter(part.values())))

    def _checked(self, batch: Batch) -> Batch:
        """A batch in the types of the inputs.

        Raises:
            TrainingError: shapes, types or labels do not fit.
        """
        file = self._file
        size = None
        checked: Batch = {}
        for name in file.fed:
            array, kind = np.asarray(batch[name]), file.types[name]
            if kind.shape[:1] == (file.batch,):
                check_samples(name, array, kind)
                if size is not None and len(array) != size:
                    raise TrainingError(f"'{name}' has {len(array)} samples, and other inputs have {size}")
                size = len(array)
            elif array.shape != kind.shape:
                raise TrainingError(
                    f"'{name}' has the shape {list(array.shape)}, and the model takes {list(kind.shape)}"
                )
            checked[name] = converted(name, array, kind)
        if size is not None and (not size or (size != file.batch and self._model is None)):
            raise TrainingError(
                f"the batch has {size} samples, and the training file takes {file.batch}; give its forward "
                "model as well, which can be planned for another batch"
            )
        self._check_labels(checked)
        return checked

    def _check_labels(self, batch: Batch) -> None:
        file = self._file
        if file.classes is None or file.target not in batch:
            return
        labels = batch[file.target]
        wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= file.classes))
        if wrong.any():
            place = np.argwhere(wrong)[0].tolist()
            found = labels[tuple(place)]
            raise TrainingError(
                f"'{file.target}' has {found} at {place}, and the model has the classes 0 to "
                f"{file.classes - 1}; {IGNORED_LABEL} leaves a sample out"
            )

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
        """Train for so many epochs; returns the figures of each, those before a resumption included.

        `data` is an `.npz` file, a mapping of arrays or a tuple of them (all samples), a re-iterable of
        batches or a function that returns one. `state` is a file that the run is saved to after each epoch,
        and after every `save_every` updates; with `resume` a run goes on from it where it is there. Where it
        cannot be written, the run goes on and callbacks hear of it.

        Raises:
            TrainingError: data do not fit, or the loss is no number.
        """
        batches = self._data(data, shuffle)
        if resume and state is not None and os.path.exists(state):
            self.load(state)
            batches = self._data(data, shuffle)
        tell = _Told(callbacks)
        try:
            while self._position.epoch < epochs:
                self._epoch(batches, validation, state, save_every, tell)
        except StopTraining:
            pass
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
        started, rate = time.perf_counter(), 0.0
        of_updates = batches.updates(self._accumulate)
        for parts in self._grouped(batches.epoch(epoch, self._position.batches)):
            rate = float(self._schedule(self._position.updates))
            loss = self._step(parts)
            size = sum(map(self._size, parts))
            self._position = self._position.after(len(parts), size, loss)
            samples = self._position.samples
            seconds = time.perf_counter() - started
            event = Event(
                "update", epoch + 1, self._position.updates, of_updates, loss, rate, seconds, samples
            )
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
            "epoch",
            epoch + 1,
            self._position.updates,
            of_updates,
            mean,
            rate,
            seconds,
            samples,
            metrics,
        )
        self._save_or_tell(state, event, tell)
        tell(event)

    def _save_or_tell(self, state: str | os.PathLike[str] | None, event: Event, tell: _Told) -> None:
        if state is None or (self._workers is not None and self._workers.rank):
            return
        try:
            self.save(state)
        except OutputFileError as error:
            tell(replace(event, kind="unsaved", message=str(error)))

    def _grouped(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        """As many batches as an update takes; of those of another size only what can be run."""
        parts: list[Batch] = []
        for batch in batches:
            if self._model is None and self._size(batch) < self._file.batch:
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
            arrays = arrays_for(given, file.types, file.fed)
            return ArrayData(arrays, file.batch, shuffle, self._position.seed, rank, count)
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
        batches = self._data(data, shuffle=False, is_shared=False).epoch(0)
        losses = weights = 0.0
        right = counted = 0
        for batch in batches:
            found = self._checked_for_evaluation(batch)
            size = self._size(found)
            session, outputs, loss = self._evaluation(size)
            session.run(found)
            weight: float = size
            if self._file.classes is not None and self._file.target in found:
                labels = found[self._file.target]
                kept = labels != IGNORED_LABEL
                weight = int(kept.sum())
                scores = session.result(outputs[0])
                axis = 1 if scores.ndim == labels.ndim + 1 else -1
                chosen = scores.argmax(axis).reshape(labels.shape)
                right += int((chosen == labels)[kept].sum())
                counted += int(kept.sum())
            if weight:
                losses += float(session.result(loss)) * weight
            weights += weight
        figures = {"loss": losses / weights if weights else float("nan")}
        if counted:
            figures["accuracy"] = right / counted
        return figures

    def _checked_for_evaluation(self, batch: Batch) -> Batch:
        model, self._model = self._model, self._model or ""
        try:
            return self._checked(batch)
        finally:
            self._model = model

    def _evaluation(self, size: int) -> tuple[BoundSession, tuple[str, ...], str]:
        if self._model is None:
            raise TrainingError("to evaluate, give the forward model beside the training file")
        if size not in self._evaluations:
            model = evaluation_model(self._model, self._options, self._shapes(size))
            held = (*self._trained, *self._file.statistics)
            proto, types = evaluation_graph(model, held, self._drawn)
            read = [name for name in held if any(value.name == name for value in proto.graph.input)]
            session = BoundSession(
                proto,
                self._arrays,
                held=read,
                replaced={},
                fetched=types,
                providers=self._providers,
                threads=self._threads,
            )
            self._evaluations[size] = (session, model.outputs, model.loss)
        return self._evaluations[size]

    # -- state and deployment ----------------------------------------------------------------------

    def _kept(self) -> tuple[str, ...]:
        states = self._file.states if self._update is None else self._state_names
        return (*self._trained, *states, *self._file.statistics)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run's state: parameters, the optimizer's states, statistics, and how far it is.

        Raises:
            OutputFileError: it cannot be written; an earlier file of that name is untouched.
        """
        arrays = {name: self._arrays.array(name) for name in self._kept()}
        save_state(RunState(self._position, arrays, optimizer_as_json(self._optimizer)), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a state that was saved.

        Raises:
            TrainingError: the file is none, or is of another model or optimizer.
        """
        state = load_state(path)
        name = os.fspath(path)
        kept = self._kept()
        missing = [key for key in kept if key not in state.arrays]
        unknown = [key for key in state.arrays if key not in kept]
        if missing or unknown:
            what = f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}', which this run has not"
            raise TrainingError(
                f"the state '{name}' {what}; give the state of a run of this model and optimizer"
            )
        for key in kept:
            array, here = state.arrays[key], self._arrays.array(key)
            if array.shape != here.shape or array.dtype != here.dtype:
                raise TrainingError(
                    f"'{key}' is {array.dtype.name} {list(array.shape)} in the state '{name}', and "
                    f"{here.dtype.name} {list(here.shape)} in this run"
                )
        for key in kept:
            self._arrays.put(key, state.arrays[key])
        if self._update is not None:
            for key in self._file.states:
                self._arrays.put_zeros(key, self._file.types[key])
        self._position = state.position

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The forward model's own file with the trained weights and statistics, to deploy.

        Names, opset and metadata stay. It is written where a path is given.

        Raises:
            OutputFileError: the file cannot be written.
            TrainingError: the forward model was not given, or its file has no place for the weights.
        """
        if self._model is None:
            raise TrainingError("to export, give the forward model beside the training file")
        if self._options.untie:
            raise TrainingError("parameters that were untied have no place of their own in the model's file")
        if path is not None:
            check_model_writable(path)
        proto, folder = load_proto(self._model)
        draft, decisions = classified(
            proto, folder, trainable=self._options.trainable, freeze=self._options.freeze
        )
        held = {
            decision.name: draft.weights[decision.name].type.dtype
            for decision in decisions
            if decision.name in self._arrays
            or (decision.role is not Role.CONSTANT and decision.name in self._drawn)
        }
        deployment = Deployment(proto, folder, draft.nodes, draft.weights, held)

        def value_of(name: str, dtype: int) -> Array:
            found = self._arrays.array(name) if name in self._arrays else self._drawn[name]
            return np.asarray(found, helper.tensor_dtype_to_np_dtype(dtype))

        deployed = deployment.filled(value_of)
        if path is not None:
            write_model(deployed, path, external_data=_has_external_data(self._model))
        return deployed


class _Told:
    """Callbacks, as one."""

    def __init__(self, callbacks: Sequence[Callable[[Event], None]]) -> None:
        self._callbacks = callbacks

    def __call__(self, event: Event) -> None:
        for callback in self._callbacks:
            callback(event)


def _rate(value: float) -> float:
    if not 0 <= value < np.inf:
        raise TrainingError(f"the learning rate is {value}; it must be at least 0")
    return float(value)


def _providers_of(provider: str | None) -> tuple[tuple[str, ...], str]:
    """The providers of a session, and the device that arrays lie on."""
    if provider is None:
        providers = default_providers()
        return providers, "cuda" if "CUDAExecutionProvider" in providers else "cpu"
    if provider not in _DEVICES:
        raise TrainingError(f"there is no provider '{provider}'; choose cpu or cuda")
    if provider == "cpu":
        return ("CPUExecutionProvider",), "cpu"
    if "CUDAExecutionProvider" not in default_providers():
        raise TrainingError("this machine has no CUDA device that ONNX Runtime can use; choose cpu")
    return ("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda"


def _options_of(file: TrainingFile) -> ReadOptions:
    options = file.options
    return ReadOptions(
        options["loss"],
        tuple(options["trainable"]),
        tuple(options["freeze"]),
        False,
        bool(options.get("freeze_bn")),
        bool(options.get("untie")),
    )


def _shapes_at(source: str | os.PathLike[str] | onnx.ModelProto, batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's inputs with another first dimension, where all others are numbers."""
    if batch < 1:
        raise TrainingError(f"a batch of {batch} samples is none; give at least 1")
    graph = load_proto(source)[0].graph
    stored = {tensor.name for tensor in graph.initializer}
    shapes = {}
    for value in graph.input:
        sizes = value.type.tensor_type.shape.dim
        if value.name not in stored and sizes and all(size.dim_value for size in sizes[1:]):
            shapes[value.name] = (batch, *(size.dim_value for size in sizes[1:]))
    return shapes


def _statistics_in_place(file: TrainingFile) -> tuple[dict[str, str], dict[str, str]]:
    """Statistics that may be written where they lie, since one node alone reads them, and the others."""
    readers = dict.fromkeys(file.statistics, 0)
    for node in file.graph.graph.node:
        for name in node.input:
            if name in readers:
                readers[name] += 1
    in_place = {old: new for old, new in file.statistics.items() if readers[old] == 1}
    return in_place, {old: new for old, new in file.statistics.items() if old not in in_place}


def _has_external_data(source: str | os.PathLike[str] | onnx.ModelProto) -> bool:
    if isinstance(source, onnx.ModelProto):
        return False
    proto = load_proto(source)[0]
    return any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer)


__all__ = ["Event", "StopTraining", "Trainer", "Workers"]
