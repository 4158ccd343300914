"""Batches from arrays, `.npz` files and iterables, in an order that a resumed run repeats."""

from __future__ import annotations

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
from onnxgc.training.files import TrainingFile

Batch = dict[str, Array]
IGNORED_LABEL = -100
_TARGET_NAMES = ("labels", "label", "target", "targets", "y")
_VALIDATION_ENDINGS = ("_validation", "_val", "_test")


class Data(Protocol):
    """Something that gives an epoch's batches."""

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch in their order, from the `first` on."""
        ...

    def updates(self, accumulate: int) -> int | None:
        """How many updates an epoch has, where it is known."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayData:
    """Arrays whose first dimension counts samples, shuffled anew in each epoch; `fixed` are in every batch.

    Of several workers each takes every `workers`-th batch, from its `worker` on.
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
            # All have as many batches, of one size.
            whole = self.samples // (self.batch * self.workers)
            shared = order[: whole * self.batch * self.workers].reshape(whole, self.workers, self.batch)
            order = shared[:, self.worker].reshape(-1)
        for start in range(first * self.batch, len(order), self.batch):
            chosen = order[start : start + self.batch]
            yield {**{name: array[chosen] for name, array in self.arrays.items()}, **self.fixed}

    def updates(self, accumulate: int) -> int:
        batches = (
            self.samples // (self.batch * self.workers)
            if self.workers > 1
            else -(-self.samples // self.batch)
        )
        return -(-batches // accumulate)


@dataclass(frozen=True, slots=True)
class IteratedData:
    """Batches that something else makes, in its order; `make` begins an epoch."""

    make: Callable[[], Iterable[Any]]
    fed: Sequence[str]
    worker: int = 0
    workers: int = 1

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        count = -1
        own: Any = None
        for count, found in enumerate(self.make()):
            if count % self.workers == self.worker:
                own = found
            # Once there is one for each: nobody waits for a step that others do not take.
            if count % self.workers == self.workers - 1 and count // self.workers >= first:
                yield named(own, self.fed)
        if count < 0:
            raise TrainingError(
                f"epoch {number + 1} has no batches; give a list or a function that begins anew, since an "
                "iterator runs once"
            )

    def updates(self, accumulate: int) -> int | None:
        return None


def named(batch: Any, fed: Sequence[str]) -> Batch:
    """A batch as arrays by the names of inputs: from a mapping, or from a tuple in their order.

    Raises:
        TrainingError: it is neither, or an input is missing.
    """
    if isinstance(batch, Mapping):
        given = {str(name): as_array(str(name), value) for name, value in batch.items()}
        return _by_inputs(given, fed, "a batch")
    if isinstance(batch, tuple | list):
        if len(batch) != len(fed):
            raise TrainingError(
                f"a batch has {len(batch)} parts, and a step takes {len(fed)}: {', '.join(fed)}"
            )
        return {name: as_array(name, value) for name, value in zip(fed, batch, strict=True)}
    raise TrainingError(
        f"a batch is a {type(batch).__name__}; give a dictionary by input names, or a tuple in the order "
        f"{', '.join(fed)}"
    )


def as_array(name: str, value: Any) -> Array:
    """A value as an array, a PyTorch tensor on the CPU included.

    Raises:
        TrainingError: it cannot be one.
    """
    try:
        detached = value.detach() if hasattr(value, "detach") else value
        return np.asarray(detached)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TrainingError(f"'{name}' cannot be read as an array: {reason}") from error


def _by_inputs(given: Mapping[str, Array], fed: Sequence[str], what: str) -> Batch:
    """The arrays that inputs take: by their names, else the only target and the only other one."""
    if all(name in given for name in fed):
        return {name: given[name] for name in fed}
    targets = [
        name for name in fed if name in ("labels", "target") or name.startswith(("labels_", "target_"))
    ]
    inputs = [name for name in fed if name not in targets]
    their_targets = [name for name in given if name.lower() in _TARGET_NAMES]
    theirs = [name for name in given if name not in their_targets]
    if len(targets) == len(their_targets) <= 1 and len(inputs) == len(theirs) == 1:
        return {
            name: given[other]
            for name, other in zip((*inputs, *targets), (*theirs, *their_targets), strict=True)
        }
    missing = next(name for name in fed if name not in given)
    ending = _ending(missing)
    clash = f"; in a file call it '{missing}_train', since {ending} is to evaluate on" if ending else ""
    raise TrainingError(
        f"{what} has no '{missing}'; it has {', '.join(map(repr, given)) or 'nothing'}, and a step takes "
        f"{', '.join(fed)}{clash}"
    )


def read_arrays(source: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of an `.npz` file.

    Raises:
        TrainingError: it is none.
    """
    try:
        with open(source, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise TrainingError(
                    f"'{source}' cannot be read as an .npz file; write one by numpy.savez, "
                    "with arrays by names"
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
    except FileNotFoundError as error:
        raise TrainingError(f"'{source}' cannot be read: there is no such file") from error
    except (IsADirectoryError, PermissionError) as error:
        raise TrainingError(f"'{source}' cannot be read: {error.strerror}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "it is cut off")
        raise TrainingError(f"'{source}' cannot be read as an .npz file: {reason}") from error


def split_arrays(
    arrays: Mapping[str, Array], inputs: Collection[str] = ()
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Arrays to train with, and those whose names end in _validation, _val or _test without the ending.

    What is called as one of a model's `inputs` is to train with, and so is a name with _train behind it.

    Raises:
        TrainingError: two arrays come to the same name.
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
            what = "train with" if part is train else "evaluate on"
            raise TrainingError(f"'{part[bare]}' and '{name}' are both '{bare}' to {what}; leave one out")
        part[bare] = name
    if evaluated and not train:
        raise TrainingError(
            f"there is nothing to train with: {', '.join(map(repr, evaluated.values()))} are to evaluate on; "
            "give arrays without _test, _val or _validation behind their names"
        )
    return (
        {bare: arrays[name] for bare, name in train.items()},
        {bare: arrays[name] for bare, name in evaluated.items()},
    )


def _ending(name: str) -> str:
    """The end of a name that says that it is evaluated on, or nothing."""
    return next((ending for ending in _VALIDATION_ENDINGS if name.endswith(ending)), "")


def arrays_for(given: Mapping[str, Any], file: TrainingFile) -> tuple[Batch, Batch]:
    """All samples as arrays of the types of inputs, and the inputs that are the same for all.

    Raises:
        TrainingError: an input is missing, or arrays do not fit the inputs or one another.
    """
    arrays = _by_inputs({name: as_array(name, value) for name, value in given.items()}, file.fed, "the data")
    counted = {name: array for name, array in arrays.items() if file.counts_samples(name)}
    for name, array in counted.items():
        check_samples(name, array, file.types[name])
        if len(array) != len(next(iter(counted.values()))):
            first = next(iter(counted))
            raise TrainingError(f"'{first}' has {len(counted[first])} samples and '{name}' {len(array)}")
        if not len(array):
            raise TrainingError(f"'{name}' has no samples")
    fitting = {name: converted(name, array, file.types[name]) for name, array in arrays.items()}
    _check_labels(fitting, file)
    return (
        {name: array for name, array in fitting.items() if name in counted},
        {name: array for name, array in fitting.items() if name not in counted},
    )


def checked(batch: Batch, file: TrainingFile) -> Batch:
    """A batch in the types of a training file's inputs, for any number of samples.

    Raises:
        TrainingError: shapes, types or labels do not fit.
    """
    size = None
    found: Batch = {}
    for name in file.fed:
        array, kind = np.asarray(batch[name]), file.types[name]
        if file.counts_samples(name):
            check_samples(name, array, kind)
            if size is not None and len(array) != size:
                raise TrainingError(f"'{name}' has {len(array)} samples, and other inputs have {size}")
            size = len(array)
        elif array.shape != kind.shape:
            raise TrainingError(
                f"'{name}' has the shape {list(array.shape)}, and the model takes {list(kind.shape)}"
            )
        found[name] = converted(name, array, kind)
    if size == 0:
        raise TrainingError("a batch has no samples")
    _check_labels(found, file)
    return found


def samples_of(batch: Batch, file: TrainingFile) -> int:
    """How many samples a batch has."""
    counted = batch[file.counted]
    return len(counted) if counted.ndim else 1


def _check_labels(arrays: Mapping[str, Array], file: TrainingFile) -> None:
    for name, labels in file.labels.items():
        given = arrays[name]
        wrong = (given < 0) | (given >= labels.classes)
        if labels.ignored is not None:
            wrong &= given != labels.ignored
        if wrong.any():
            place = np.argwhere(wrong)[0].tolist()
            told = "" if labels.ignored is None else f"; {labels.ignored} leaves a sample out"
            raise TrainingError(
                f"'{name}' has {given[tuple(place)]} at {place}, and the model has the classes 0 to "
                f"{labels.classes - 1}{told}"
            )


def check_samples(name: str, array: Array, kind: TensorType) -> None:
    """Refuses an array whose samples have another shape than an input takes."""
    if array.ndim != len(kind.shape) or array.shape[1:] != kind.shape[1:]:
        told = ", ".join(["any", *map(str, kind.shape[1:])]) if kind.shape else ""
        raise TrainingError(f"'{name}' has the shape {list(array.shape)}, and the model takes [{told}]")


def converted(name: str, array: Array, kind: TensorType) -> Array:
    """An array in the type of an input, where that is of the same kind of numbers.

    Raises:
        TrainingError: it is of another kind, or does not fit.
    """
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(kind.dtype))
    if array.dtype == wanted:
        return array
    is_float = [_is_floating(dtype) for dtype in (array.dtype, wanted)]
    is_whole = [np.issubdtype(dtype, np.integer) for dtype in (array.dtype, wanted)]
    if all(is_whole):
        limits = np.iinfo(wanted)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise TrainingError(f"'{name}' has values that {wanted.name} does not hold")
    elif not all(is_float):
        raise TrainingError(
            f"'{name}' is {array.dtype.name}, and the model takes {dtype_name(kind.dtype)}; convert it first"
        )
    with np.errstate(over="ignore"):
        return array.astype(wanted)


def _is_floating(dtype: np.dtype[Any]) -> bool:
    # The short types of machine learning are no NumPy types.
    return np.issubdtype(dtype, np.floating) or dtype.name in ("bfloat16", "float16")
