"""Single updates and evaluations of a model on ONNX Runtime."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgc.errors import TrainingError
from onnxgc.model.core.ir import Array
from onnxgc.model.files.load import source_of
from onnxgc.tracing.optimizers import KEEP, LEARNING_RATE, STEP, UpdateRule
from onnxgc.training.data import Batch, Data, batch_by_input, data_of, fitting_batch, samples_of
from onnxgc.training.evaluation import Metric, evaluate
from onnxgc.training.learning_rates import Schedule, checked_rate, schedule_of
from onnxgc.training.run_source import Source
from onnxgc.training.sessions import Engine, providers_of
from onnxgc.training.state import Position
from onnxgc.training.training_file import DRAW, LOSS_SCALE
from onnxgc.training.workers import SingleWorker, Workers


class Stepper:
    """Takes updates one by one; `Trainer` adds epochs, saved states and export. See there for arguments."""

    def __init__(
        self,
        source: Any,
        *,
        model: Any = None,
        optimizer: UpdateRule | str | None = None,
        learning_rate: float | Schedule = 1e-3,
        batch: int | None = None,
        accumulate: int = 1,
        workers: Workers | None = None,
        provider: str | None = None,
        threads: int | None = None,
        cuda_graph: bool = False,
        seed: int | None = None,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        if accumulate < 1:
            raise TrainingError(f"gradients of {accumulate} steps cannot be accumulated; give at least 1")
        self._providers, device = providers_of(provider)
        self._accumulate = accumulate
        self._workers: Workers = workers or SingleWorker()
        self._schedule = schedule_of(learning_rate)
        self._seed = seed
        self._position = Position(seed=seed or 0)
        planning = {
            "optimizer": optimizer,
            "batch": batch,
            "accumulate": accumulate if accumulate > 1 else None,
            "workers": workers,
        }
        source = Source.choose(
            source_of(source),
            None if model is None else source_of(model),
            {**options, **{name: value for name, value in planning.items() if value is not None}},
            provider=device,
            seed=seed or 0,
            progress=progress or (lambda stage: None),
        )
        self._order: Mapping[str, Any] = {}
        self._engine = Engine(source, providers=self._providers, device=device, threads=threads, cuda_graph=cuda_graph)
        self._source = self._engine.source
        self._file = self._source.file

    def __setattr__(self, name: str, value: object) -> None:
        """Rejects attributes whose assignment would have no effect."""
        if not name.startswith("_") and name != "learning_rate":
            raise TrainingError(
                f"'{name}' of a Trainer cannot be changed; create a new Trainer with another {name} "
                "(only learning_rate can be assigned)"
            )
        super().__setattr__(name, value)

    # -- one step ----------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the next update; accepts a number or a function of the number of previous updates."""
        return self._rate(self._position.updates)

    @learning_rate.setter
    def learning_rate(self, rate: float | Schedule) -> None:
        self._schedule = schedule_of(rate)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self._file.batch

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a batch's arrays, in order: the model's inputs and the target."""
        return {name: self._file.types[name].shape for name in self._file.fed}

    @property
    def updates(self) -> int:
        """Number of updates so far."""
        return self._position.updates

    @property
    def report(self) -> Mapping[str, Any]:
        """The report of `optimize`; empty for a training file."""
        return self._source.report

    @property
    def simulated_peak_bytes(self) -> int:
        """Simulated peak of a step, the optimizer's state included."""
        return self._file.simulated_peak_bytes + self._engine.state_bytes

    def described(self) -> dict[str, Any]:
        """Key figures of the run."""
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
        """Updates of an epoch over these data, or None if unknown."""
        return self._data(data, shuffle=True).updates(self._accumulate)

    def addresses(self) -> dict[str, int]:
        """The address of each parameter and state, which never changes."""
        engine = self._engine
        return {name: engine.arrays.address(name) for name in (*engine.parameters, *engine.states)}

    def array(self, name: str) -> Array:
        """A copy of a parameter, a state or a running statistic.

        Raises:
            TrainingError: the name is unknown.
        """
        if name not in self._engine.arrays:
            raise TrainingError(f"'{name}' is not a parameter, state or statistic of this run")
        return np.array(self._engine.arrays.array(name))

    def parameters(self) -> dict[str, Array]:
        """Copies of all parameters, by name."""
        return {name: self.array(name) for name in self._engine.parameters}

    def step(self, batch: Any) -> float:
        """Updates the parameters by one batch, or by a list of batches to accumulate; returns the mean loss.

        Raises:
            TrainingError: the batch does not fit, or the loss is not finite.
        """
        parts = batch if isinstance(batch, list) and self._accumulate > 1 else [batch]
        if not 1 <= len(parts) <= self._accumulate:
            raise TrainingError(f"{len(parts)} batches are given, and an update takes {self._accumulate}")
        return self._step([self._checked(batch_by_input(part, self._file.fed)) for part in parts])

    def _step(self, parts: Sequence[Batch]) -> float:
        sizes = [samples_of(part, self._file) for part in parts]
        total = self._workers.total(float(sum(sizes)))
        scalars: dict[str, Array] = {
            LEARNING_RATE: np.asarray(self._rate(self._position.updates), np.float32),
            STEP: np.asarray(self._position.updates + 1, np.int64),
        }
        mean = 0.0
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            scalars[KEEP] = np.asarray(float(number > 0), np.float32)
            scalars[DRAW] = np.asarray(self._next_draw(), np.int64)
            if self._engine.accumulates:
                scalars[LOSS_SCALE] = np.asarray(size / total, np.float32)
            mean += self._engine.step(part, scalars, size) * size / total
        mean = self._workers.total(mean)
        # Before the update of accumulated gradients changes the parameters.
        self._check_loss(mean)
        self._workers.add_up(self._engine.arrays, self._engine.sums)
        self._engine.update(scalars)
        self._position = replace(self._position, updates=self._position.updates + 1)
        return mean

    def _rate(self, updates: int) -> float:
        """The learning rate after a number of updates."""
        rate = self._schedule(updates)
        try:
            return checked_rate(float(rate))
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"the learning rate of update {updates + 1} is {rate!r}, which is not a number"
            ) from error

    def _next_draw(self) -> int:
        draw = self._position.draws * self._workers.count + self._workers.rank
        self._position = replace(self._position, draws=self._position.draws + 1)
        return draw

    def _check_loss(self, loss: float) -> None:
        if np.isfinite(loss):
            return
        effect = "the parameters are no longer usable"
        if self._engine.accumulates:
            self._engine.forget_sums()
            effect = "the parameters are unchanged"
            effect += ", but not the running statistics" if self._file.statistics else ""
        raise TrainingError(
            f"the loss is {loss} in update {self._position.updates + 1}, and {effect}; return to a saved "
            "state, and lower the learning rate, warm it up, or clip gradients"
        )

    def _checked(self, batch: Batch) -> Batch:
        """A batch converted to the types of the inputs.

        Raises:
            TrainingError: shapes, types or labels do not fit.
        """
        fitting = fitting_batch(batch, self._file)
        size = samples_of(fitting, self._file)
        if size != self.batch and self._source.model is None:
            raise TrainingError(
                f"the batch has {size} samples, and the training file takes {self.batch}; pass its forward "
                "model too, which can be planned for other batch sizes"
            )
        return fitting

    def _data(self, given: Any, shuffle: bool, *, is_shared: bool = True) -> Data:
        """Data as batches, distributed over the workers if `is_shared`."""
        workers = self._workers if is_shared else SingleWorker()
        return data_of(given, self._file, shuffle, self._position.seed, workers.rank, workers.count)

    # -- evaluation --------------------------------------------------------------------------------

    def evaluate(self, data: Any, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """The mean loss over all samples in inference mode, for cross-entropy the accuracy, and other metrics.

        Each metric is a function of the first output and the labels or targets of all samples:
        `{"mae": lambda output, target: np.abs(output - target).mean()}`.

        Raises:
            TrainingError: the forward model was not given, or data do not fit.
        """
        batches = self._data(data, shuffle=False, is_shared=False).epoch(0)
        return evaluate(self._file, batches, self._engine.evaluation, metrics or {})
