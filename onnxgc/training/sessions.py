"""Sessions that share arrays: training steps, updates and evaluation, for any number of samples."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import onnx

from onnxgc.api.evaluation_model import evaluation_graph, evaluation_model
from onnxgc.emission.accumulated_update_graph import update_model
from onnxgc.errors import TrainingError
from onnxgc.model.core.ir import Array, TensorType
from onnxgc.runtime.io_binding import BoundSession, DeviceArrays
from onnxgc.runtime.ort import PROVIDERS, default_providers
from onnxgc.tracing.optimizers import Accumulation, UpdateRule
from onnxgc.training.evaluation import Evaluation
from onnxgc.training.run_source import Source
from onnxgc.training.training_file import TrainingFile

_MAX_OTHER_SIZES = 3
"""Number of other batch sizes whose sessions are kept."""
_Session = TypeVar("_Session")


class Engine:
    """Parameters, states and statistics in place, and the sessions that read and write them.

    If the training file accumulates gradients, a separate graph updates the parameters by the sums.
    """

    def __init__(
        self, source: Source, *, providers: Sequence[str], device: str, threads: int | None, cuda_graph: bool = False
    ) -> None:
        self.arrays = DeviceArrays(device)
        self._providers = tuple(providers)
        self._threads = threads
        self._cuda_graph = cuda_graph
        file = source.file
        for name in tuple(file.initial):
            # The only copy from here on.
            self.arrays.put(name, file.initial.pop(name))
        for name in file.states:
            self.arrays.put_zeros(name, file.types[name])
        self.parameters = tuple(file.states_of)
        self.states: tuple[str, ...] = tuple(file.states)
        """The optimizer's states, without sums of gradients."""
        self.sums: tuple[str, ...] = ()
        """Accumulated gradients, in the order of the parameters."""
        self._update: BoundSession | None = None
        self._update_scalars: dict[str, str] = {}
        if isinstance(file.optimizer, Accumulation):
            self.sums, self.states = self.states, ()
            self._update = self._updating(file, source.optimizer)
        first = self._step_of(file)
        self._steps = {file.batch: first}
        self.source = replace(source, file=first.file)
        self._evaluations: dict[int, Evaluation] = {}

    @property
    def accumulates(self) -> bool:
        """Whether steps accumulate gradients, so that `update` must be called."""
        return self._update is not None

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's states, sums of gradients included."""
        return sum(self.arrays.array(name).nbytes for name in (*self.states, *self.sums))

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the arrays in a run's state."""
        return (*self.parameters, *self.states, *self.source.file.statistics)

    def step(self, feeds: Mapping[str, Array], scalars: Mapping[str, Array], samples: int) -> float:
        """Runs one training step with `scalars` by meaning, and returns the loss."""
        step = self._of_size(self._steps, samples, lambda size: self._step_of(self.source.file_of(size)))
        names = step.file.scalars
        numbers = {names[key]: value for key, value in scalars.items() if key in names}
        step.session.run({**feeds, **numbers})
        for old, new in step.copied.items():
            self.arrays.put(old, step.session.result(new))
        return float(step.session.result(step.file.loss))

    def update(self, scalars: Mapping[str, Array]) -> None:
        """Updates the parameters by accumulated gradients; without accumulation, does nothing."""
        if self._update is not None:
            self._update.run({name: scalars[key] for key, name in self._update_scalars.items()})

    def forget_sums(self) -> None:
        """Resets the accumulated gradients."""
        for name in self.sums:
            self.arrays.put_zeros(name, self.source.file.types[name])

    def evaluation(self, samples: int) -> Evaluation:
        """The model in inference mode for a number of samples.

        Raises:
            TrainingError: the forward model was not given.
        """
        if self.source.model is None:
            raise TrainingError("evaluation needs the forward model; pass it together with the training file")
        return self._of_size(self._evaluations, samples, self._evaluation_of)

    def _of_size(self, made: dict[int, _Session], samples: int, make: Callable[[int], _Session]) -> _Session:
        """The session for a number of samples, created if needed; few other sizes are kept."""
        if samples not in made:
            others = [size for size in (*made, samples) if size != self.source.file.batch]
            for size in others[:-_MAX_OTHER_SIZES]:
                # Before the next one allocates memory.
                del made[size]
        made[samples] = made.pop(samples) if samples in made else make(samples)
        return made[samples]

    def _step_of(self, file: TrainingFile) -> "_Step":
        copied = _copied_statistics(file)
        replaced = {
            new: old
            for pairs in (file.parameters, file.states, file.statistics)
            for old, new in pairs.items()
            if old not in copied
        }
        fetched = (file.loss, *filter(None, [file.norm]), *copied.values())
        outputs = {name: file.types[name] for name in fetched}
        session = self._session(file.graph, file.held, replaced, outputs, cuda_graph=self._cuda_graph)
        if file.has_barriers or session.keeps_order:
            return _Step(replace(file, with_barriers=None), session, copied)
        del session
        if file.with_barriers is not None and not self._cuda_graph:
            return self._step_of(file.with_barriers())
        raise TrainingError(
            "ONNX Runtime lacks kernels for this step and would not run it in order; create the training "
            "file with --barriers auto, and leave --cuda-graph out"
        )

    def _evaluation_of(self, samples: int) -> Evaluation:
        assert self.source.model is not None, "checked earlier"
        shapes = self.source.shapes_of(samples)
        model = evaluation_model(self.source.model, self.source.options, shapes)
        weights = (*self.parameters, *self.source.file.statistics)
        proto, fed = evaluation_graph(model, weights, self.source.drawn)
        outputs = {value.name: model.types[value.name] for value in proto.graph.output}
        return Evaluation(self._session(proto, fed, {}, outputs), model.outputs, model.loss)

    def _session(
        self,
        proto: onnx.ModelProto,
        held: Sequence[str],
        replaced: Mapping[str, str],
        fetched: Mapping[str, TensorType],
        *,
        cuda_graph: bool = False,
    ) -> BoundSession:
        return BoundSession(
            proto,
            self.arrays,
            held=held,
            replaced=replaced,
            fetched=fetched,
            providers=self._providers,
            threads=self._threads,
            cuda_graph=cuda_graph,
        )

    def _updating(self, file: TrainingFile, optimizer: UpdateRule) -> BoundSession:
        types = {name: file.types[name] for name in self.parameters}
        sums = {name: states[0] for name, states in file.states_of.items()}
        proto, updates = update_model(optimizer, types, sums, file.types)
        for name in updates.state_names:
            self.arrays.put_zeros(name, updates.types[name])
        self.states = updates.state_names
        self._update_scalars = dict(updates.scalars)
        held = [*types, *sums.values(), *updates.state_names]
        fetched = {updates.norm: updates.types[updates.norm]} if updates.norm else {}
        return self._session(proto, held, updates.replaced, fetched)


@dataclass(frozen=True, slots=True)
class _Step:
    """A training file with its session; `copied` are statistics that are not updated in place."""

    file: TrainingFile
    session: BoundSession
    copied: Mapping[str, str]


def _copied_statistics(file: TrainingFile) -> dict[str, str]:
    """Statistics with several readers, which may still read them after the update is computed."""
    readers = Counter(name for node in file.graph.graph.node for name in node.input)
    return {old: new for old, new in file.statistics.items() if readers[old] != 1}


def providers_of(provider: str | None) -> tuple[tuple[str, ...], str]:
    """The providers of a session, and the device of its arrays.

    Raises:
        TrainingError: the provider is unknown, or the machine does not have it.
    """
    if provider is None:
        providers = default_providers()
        return providers, "cuda" if "CUDAExecutionProvider" in providers else "cpu"
    if provider not in PROVIDERS:
        raise TrainingError(f"unknown provider '{provider}'; choose cpu or cuda")
    if provider == "cpu":
        return ("CPUExecutionProvider",), "cpu"
    if "CUDAExecutionProvider" not in default_providers():
        raise TrainingError("this machine has no CUDA device that ONNX Runtime can use; choose cpu")
    return ("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda"
