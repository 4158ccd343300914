"""Sessions on one set of arrays: training steps, updates, and evaluation, for any number of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from onnxgc.emission.updates import update_model
from onnxgc.errors import TrainingError
from onnxgc.model.core.ir import Array
from onnxgc.runtime.io_binding import BoundSession, DeviceArrays
from onnxgc.tracing.optimizers import Accumulation
from onnxgc.training.evaluation import Evaluation, evaluation_graph, evaluation_model
from onnxgc.training.files import TrainingFile
from onnxgc.training.source import Source

_OTHER_SIZES = 3
"""Of how many sizes beside a step's own the sessions stay."""
_Made = TypeVar("_Made")


class Engine:
    """What computes: parameters, states and statistics in place, and the graphs that read and write them.

    Where the training file adds gradients up, another graph updates the parameters by the sums.
    """

    def __init__(self, source: Source, *, providers: Sequence[str], device: str, threads: int | None) -> None:
        self.source = source
        self.arrays = DeviceArrays(device)
        self._providers = tuple(providers)
        self._threads = threads
        file = source.file
        for name in tuple(file.initial):
            # Held from here on in one place alone.
            self.arrays.put(name, file.initial.pop(name))
        for name in file.states:
            self.arrays.put_zeros(name, file.types[name])
        self.parameters = tuple(file.states_of)
        self.states: tuple[str, ...] = tuple(file.states)
        """What the optimizer keeps, but for sums of gradients."""
        self.sums: tuple[str, ...] = ()
        """Gradients that are added up, by the order of the parameters."""
        self._update: BoundSession | None = None
        self._update_scalars: dict[str, str] = {}
        if isinstance(file.optimizer, Accumulation):
            self.sums, self.states = self.states, ()
            self._update = self._updating(file)
        self._steps = {file.batch: self._step_of(file)}
        self._evaluations: dict[int, Evaluation] = {}

    @property
    def accumulates(self) -> bool:
        """Whether steps add gradients up, and `update` is called for itself."""
        return self._update is not None

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps, sums of gradients included."""
        return sum(self.arrays.array(name).nbytes for name in (*self.states, *self.sums))

    @property
    def kept(self) -> tuple[str, ...]:
        """What a run's state is made of."""
        return (*self.parameters, *self.states, *self.source.file.statistics)

    def step(self, feeds: Mapping[str, Array], scalars: Mapping[str, Array], samples: int) -> float:
        """One training step; `scalars` by what they are. Returns the loss."""
        step = self._of_size(self._steps, samples, lambda size: self._step_of(self.source.file_of(size)))
        names = step.file.scalars
        numbers = {names[key]: value for key, value in scalars.items() if key in names}
        step.session.run({**feeds, **numbers})
        for old, new in step.beside.items():
            self.arrays.put(old, step.session.result(new))
        return float(step.session.result(step.file.loss))

    def update(self, scalars: Mapping[str, Array]) -> None:
        """Update the parameters by gradients that were added up; nothing where each step has done so."""
        if self._update is not None:
            self._update.run({name: scalars[key] for key, name in self._update_scalars.items()})

    def forget_sums(self) -> None:
        """Have the gradients begin anew, whatever they are."""
        for name in self.sums:
            self.arrays.put_zeros(name, self.source.file.types[name])

    def evaluation(self, samples: int) -> Evaluation:
        """The model in inference mode for so many samples.

        Raises:
            TrainingError: the forward model was not given.
        """
        if self.source.model is None:
            raise TrainingError("to evaluate, give the forward model beside the training file")
        return self._of_size(self._evaluations, samples, self._evaluation_of)

    def _of_size(self, made: dict[int, _Made], samples: int, make: Callable[[int], _Made]) -> _Made:
        """What is there for so many samples, or is made; of other sizes only those used last stay."""
        if samples not in made:
            others = [size for size in (*made, samples) if size != self.source.file.batch]
            for size in others[:-_OTHER_SIZES]:
                # Before another takes memory.
                del made[size]
        found = made.pop(samples) if samples in made else make(samples)
        made[samples] = found
        return found

    def _step_of(self, file: TrainingFile) -> _Step:
        return _Step(file, self._session(file), _beside(file))

    def _evaluation_of(self, samples: int) -> Evaluation:
        assert self.source.model is not None, "asked for before"
        shapes = self.source.shapes_of(samples)
        model = evaluation_model(self.source.model, self.source.options, shapes)
        held = (*self.parameters, *self.source.file.statistics)
        graph = evaluation_graph(model, held, self.source.drawn)
        session = BoundSession(
            graph.proto,
            self.arrays,
            held=graph.held,
            replaced={},
            fetched=graph.outputs,
            providers=self._providers,
            threads=self._threads,
        )
        return Evaluation(session, model.outputs, model.loss)

    def _session(self, file: TrainingFile) -> BoundSession:
        beside = _beside(file)
        replaced = {
            new: old
            for pairs in (file.parameters, file.states, file.statistics)
            for old, new in pairs.items()
            if old not in beside
        }
        fetched = (file.loss, *([file.norm] if file.norm else []), *beside.values())
        return BoundSession(
            file.graph,
            self.arrays,
            held=file.held,
            replaced=replaced,
            fetched={name: file.types[name] for name in fetched},
            providers=self._providers,
            threads=self._threads,
        )

    def _updating(self, file: TrainingFile) -> BoundSession:
        types = {name: file.types[name] for name in self.parameters}
        sums = {name: states[0] for name, states in file.states_of.items()}
        proto, updates = update_model(self.source.optimizer, types, sums, file.types)
        for name in updates.state_names:
            self.arrays.put_zeros(name, updates.types[name])
        self.states = updates.state_names
        self._update_scalars = dict(updates.scalars)
        return BoundSession(
            proto,
            self.arrays,
            held=[*types, *sums.values(), *updates.state_names],
            replaced=updates.replaced,
            fetched={updates.norm: updates.types[updates.norm]} if updates.norm else {},
            providers=self._providers,
            threads=self._threads,
        )


class _Step:
    """A training file with its session; `beside` are statistics that are not written where they lie."""

    def __init__(self, file: TrainingFile, session: BoundSession, beside: Mapping[str, str]) -> None:
        self.file = file
        self.session = session
        self.beside = beside


def _beside(file: TrainingFile) -> dict[str, str]:
    """Statistics that several nodes read: what replaces them may be there before the last has read."""
    readers = dict.fromkeys(file.statistics, 0)
    for node in file.graph.graph.node:
        for name in node.input:
            if name in readers:
                readers[name] += 1
    return {old: new for old, new in file.statistics.items() if readers[old] != 1}
