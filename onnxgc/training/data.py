"""Batches from arrays, `.npz` files and iterables, in an order that a resumed run repeats."""

import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from onnx import helper

from onnxgc.errors import TrainingError
from onnxgc.model.core.ir import Array, TensorType, dtype_name
from onnxgc.training.training_file import TrainingFile

Batch = dict[str, Array]
_TARGET_NAMES = ("labels", "label", "target", "targets", "y")
_VALIDATION_ENDINGS = ("_validation", "_val", "_test")


class Data(Protocol):
    """A source of batches."""

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch in order, starting with batch `first`."""
        ...

    def updates(self, accumulate: int) -> int | None:
        """Updates of an epoch, or None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayData:
    """Arrays with samples along the first dimension, shuffled in each epoch; `fixed` are in every batch.

    Each of several workers takes every `workers`-th batch, starting with batch `worker`.
    """

    arrays: Mapping[str, Array]
    batch: int
    shuffle: bool = True
    seed: int = 0
    worker: int = 0
    workers: int = 1
    fixed: Mapping[str, Array] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return len(next(iter(self.arrays.values())))

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        order = np.arange(self.samples)
        if self.shuffle:
            order = np.random.default_rng([self.seed, number]).permutation(self.samples)
        if self.workers > 1:
            rounds = self._rounds
            shared = order[: rounds * self.batch * self.workers].reshape(rounds, self.workers, self.batch)
            order = shared[:, self.worker].reshape(-1)
        for start in range(first * self.batch, len(order), self.batch):
            chosen = order[start : start + self.batch]
            yield {**{name: array[chosen] for name, array in self.arrays.items()}, **self.fixed}

    def updates(self, accumulate: int) -> int:
        batches = self._rounds if self.workers > 1 else -(-self.samples // self.batch)
        return -(-batches // accumulate)

    @property
    def _rounds(self) -> int:
        """Batches of each of several workers: equally many, of one size."""
        return self.samples // (self.batch * self.workers)


@dataclass(frozen=True, slots=True)
class IteratedData:
    """Batches from an iterable, in its order; `make` starts an epoch."""

    make: Callable[[], Iterable[Any]]
    fed: Sequence[str]
    worker: int = 0
    workers: int = 1

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        index = -1
        mine: Any = None
        for index, batch in enumerate(self.make()):
            if index % self.workers == self.worker:
                mine = batch
            # Only complete rounds of `workers` batches, so that all workers take equally many steps.
            if index % self.workers == self.workers - 1 and index // self.workers >= first:
                yield batch_by_input(mine, self.fed)
        if index < 0:
            raise TrainingError(
                f"epoch {number + 1} has no batches; give a list, or a function that returns a new iterator "
                "for each epoch"
            )

    def updates(self, accumulate: int) -> int | None:
        return None


def batch_by_input(batch: Any, fed: Sequence[str]) -> Batch:
    """A batch as arrays by input names, from a mapping or from a tuple in the order of inputs.

    Raises:
        TrainingError: the batch has another form, or an input is missing.
    """
    if isinstance(batch, Mapping):
        given = {str(name): as_array(str(name), value) for name, value in batch.items()}
        return _by_inputs(given, fed, "a batch")
    if isinstance(batch, tuple | list):
        if len(batch) != len(fed):
            raise TrainingError(f"a batch has {len(batch)} parts, and a step takes {len(fed)}: {', '.join(fed)}")
        return {name: as_array(name, value) for name, value in zip(fed, batch, strict=True)}
    raise TrainingError(
        f"a batch is a {type(batch).__name__}; give a dictionary by input names, or a tuple in the order "
        f"{', '.join(fed)}"
    )


def as_array(name: str, value: Any) -> Array:
    """A value as an array, a PyTorch tensor on the CPU included.

    Raises:
        TrainingError: the conversion fails.
    """
    try:
        detached = value.detach() if hasattr(value, "detach") else value
        return np.asarray(detached)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TrainingError(f"'{name}' cannot be read as an array: {reason}") from error


def _by_inputs(given: Mapping[str, Array], fed: Sequence[str], what: str) -> Batch:
    """The array of each input: by name, or the only target and the only other array."""
    if all(name in given for name in fed):
        return {name: given[name] for name in fed}
    targets = [name for name in fed if name in ("labels", "target") or name.startswith(("labels_", "target_"))]
    inputs = [name for name in fed if name not in targets]
    their_targets = [name for name in given if name.lower() in _TARGET_NAMES]
    theirs = [name for name in given if name not in their_targets]
    if len(targets) == len(their_targets) <= 1 and len(inputs) == len(theirs) == 1:
        return {name: given[other] for name, other in zip((*inputs, *targets), (*theirs, *their_targets), strict=True)}
    missing = next(name for name in fed if name not in given)
    ending = _ending(missing)
    clash = f"; rename it to '{missing}_train': names with {ending} are for evaluation" if ending else ""
    raise TrainingError(
        f"{what} has no '{missing}'; it has {', '.join(map(repr, given)) or 'nothing'}, and a step takes "
        f"{', '.join(fed)}{clash}"
    )


def read_arrays(source: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of an `.npz` file.

    Raises:
        TrainingError: the file cannot be read.
    """
    try:
        with open(source, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise TrainingError(
                    f"'{source}' cannot be read as an .npz file; write one with numpy.savez and named arrays"
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
    except FileNotFoundError as error:
        raise TrainingError(f"'{source}' cannot be read: the file does not exist") from error
    except (IsADirectoryError, PermissionError) as error:
        raise TrainingError(f"'{source}' cannot be read: {error.strerror}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "the file is truncated")
        raise TrainingError(f"'{source}' cannot be read as an .npz file: {reason}") from error


def split_arrays(
    arrays: Mapping[str, Array], inputs: Collection[str] = ()
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Arrays for training, and arrays for evaluation, whose names end in _validation, _val or _test.

    Both are returned without endings. Names of a model's `inputs` and names in _train are for training.

    Raises:
        TrainingError: two arrays have the same name without endings.
    """
    train: dict[str, str] = {}
    evaluated: dict[str, str] = {}
    for name in arrays:
        if name in inputs:
            part, bare = train, name
        elif ending := _ending(name):
            part, bare = evaluated, name.removesuffix(ending)
        else:
            part, bare = train, name.removesuffix("_train")
        if bare in part:
            purpose = "training" if part is train else "evaluation"
            raise TrainingError(f"'{part[bare]}' and '{name}' are both '{bare}' for {purpose}; omit one")
        part[bare] = name
    if evaluated and not train:
        raise TrainingError(
            f"no arrays are for training: {', '.join(map(repr, evaluated.values()))} are for evaluation; "
            "give arrays whose names do not end in _test, _val or _validation"
        )
    return (
        {bare: arrays[name] for bare, name in train.items()},
        {bare: arrays[name] for bare, name in evaluated.items()},
    )


def _ending(name: str) -> str:
    """The ending of a name for evaluation, or ""."""
    return next((ending for ending in _VALIDATION_ENDINGS if name.endswith(ending)), "")


def arrays_for(given: Mapping[str, Any], file: TrainingFile) -> tuple[Batch, Batch]:
    """All samples as arrays in the types of inputs, and the inputs shared by all samples.

    Raises:
        TrainingError: an input is missing, or arrays do not fit the inputs or each other.
    """
    arrays = _by_inputs({name: as_array(name, value) for name, value in given.items()}, file.fed, "the data")
    per_sample = {name: array for name, array in arrays.items() if file.counts_samples(name)}
    first = next(iter(per_sample), "")
    for name, array in per_sample.items():
        _check_samples(name, array, file.types[name])
        if len(array) != len(per_sample[first]):
            raise TrainingError(f"'{first}' has {len(per_sample[first])} samples and '{name}' {len(array)}")
        if not len(array):
            raise TrainingError(f"'{name}' has no samples")
    fitting = {name: _converted(name, array, file.types[name]) for name, array in arrays.items()}
    _check_labels(fitting, file)
    return (
        {name: fitting[name] for name in per_sample},
        {name: array for name, array in fitting.items() if name not in per_sample},
    )


def fitting_batch(batch: Batch, file: TrainingFile) -> Batch:
    """A batch of any number of samples, converted to the types of a training file's inputs.

    Raises:
        TrainingError: shapes, types or labels do not fit.
    """
    size = None
    fitting: Batch = {}
    for name in file.fed:
        array, wanted = np.asarray(batch[name]), file.types[name]
        if file.counts_samples(name):
            _check_samples(name, array, wanted)
            if size is not None and len(array) != size:
                raise TrainingError(f"'{name}' has {len(array)} samples, and other inputs have {size}")
            size = len(array)
        elif array.shape != wanted.shape:
            raise TrainingError(f"'{name}' has the shape {list(array.shape)}, and the model takes {list(wanted.shape)}")
        fitting[name] = _converted(name, array, wanted)
    if size == 0:
        raise TrainingError("a batch has no samples")
    _check_labels(fitting, file)
    return fitting


def samples_of(batch: Batch, file: TrainingFile) -> int:
    """Number of samples in a batch."""
    array = batch[file.sample_input]
    return len(array) if array.ndim else 1


def _check_labels(arrays: Mapping[str, Array], file: TrainingFile) -> None:
    for name, labels in file.labels.items():
        given = arrays[name]
        wrong = (given < 0) | (given >= labels.classes)
        if labels.ignored is not None:
            wrong &= given != labels.ignored
        if wrong.any():
            index = np.argwhere(wrong)[0].tolist()
            hint = "" if labels.ignored is None else f"; {labels.ignored} ignores a sample"
            raise TrainingError(
                f"'{name}' has {given[tuple(index)]} at {index}, and the model has the classes 0 to "
                f"{labels.classes - 1}{hint}"
            )


def _check_samples(name: str, array: Array, wanted: TensorType) -> None:
    """Raises an error unless samples have the shape of an input."""
    if array.ndim != len(wanted.shape) or array.shape[1:] != wanted.shape[1:]:
        sizes = ", ".join(["any", *map(str, wanted.shape[1:])]) if wanted.shape else ""
        raise TrainingError(f"'{name}' has the shape {list(array.shape)}, and the model takes [{sizes}]")


def _converted(name: str, array: Array, input_type: TensorType) -> Array:
    """An array converted to the type of an input, if both are floating or both are integers."""
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(input_type.dtype))
    if array.dtype == wanted:
        return array
    if np.issubdtype(array.dtype, np.integer) and np.issubdtype(wanted, np.integer):
        limits = np.iinfo(wanted)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise TrainingError(f"'{name}' has values outside of the range of {wanted.name}")
    elif not (_is_floating(array.dtype) and _is_floating(wanted)):
        raise TrainingError(
            f"'{name}' is {array.dtype.name}, and the model takes {dtype_name(input_type.dtype)}; convert it first"
        )
    with np.errstate(over="ignore"):
        return array.astype(wanted)


def _is_floating(dtype: np.dtype[Any]) -> bool:
    # NumPy does not count bfloat16 as floating.
    return np.issubdtype(dtype, np.floating) or dtype.name in ("bfloat16", "float16")


def data_of(given: Any, file: TrainingFile, shuffle: bool, seed: int, worker: int, workers: int) -> Data:
    """Batches from an `.npz` file, from arrays or from an iterable of batches.

    Raises:
        TrainingError: the data have another form, or do not fit the inputs.
    """
    if isinstance(given, str | os.PathLike):
        given = read_arrays(given)
    if isinstance(given, tuple) and all(hasattr(part, "shape") for part in given):
        given = batch_by_input(given, file.fed)
    if isinstance(given, Mapping):
        arrays, fixed = arrays_for(given, file)
        return ArrayData(arrays, file.batch, shuffle, seed, worker, workers, fixed)
    if callable(given):
        return IteratedData(given, file.fed, worker, workers)
    if isinstance(given, Iterable):
        return IteratedData(lambda: given, file.fed, worker, workers)
    raise TrainingError(f"data are a {type(given).__name__}; give an .npz file, arrays by input names, or batches")
