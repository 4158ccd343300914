"""The state of a run in one safetensors file, and checks that a run can resume from it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from safetensors import SafetensorError

from onnxgc import __version__
from onnxgc.emission.contract import CONTRACT_KEY, UPDATES_KEY, contract_in
from onnxgc.emission.state_file import metadata_of, one_line, read_arrays, write_arrays
from onnxgc.errors import TrainingError
from onnxgc.model.core.ir import Array

SCHEMA = 1
_KEY = "onnxgc.training"
_SETTINGS_OF_A_RUN = ("loss", "samples of an update")
"""Settings that are fixed for a whole run; within an epoch all settings are."""


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of a run: updates and random draws so far, and progress within the current epoch.

    `losses` is the sum of the losses of the epoch's samples, `batch` the samples of a step, and `history`
    the figures of earlier epochs.
    """

    updates: int = 0
    draws: int = 0
    epoch: int = 0
    batches: int = 0
    samples: int = 0
    losses: float = 0.0
    seed: int = 0
    batch: int = 0
    history: tuple[Mapping[str, Any], ...] = ()

    def after(self, batches: int, samples: int, loss: float) -> "Position":
        """The position after an update."""
        return replace(
            self, batches=self.batches + batches, samples=self.samples + samples, losses=self.losses + loss * samples
        )

    def at_epoch(self, epoch: int, history: tuple[Mapping[str, Any], ...]) -> "Position":
        return replace(self, epoch=epoch, batches=0, samples=0, losses=0.0, history=history)


@dataclass(frozen=True, slots=True)
class RunState:
    """Parameters, an optimizer's states and running statistics by name, and the position of the run.

    `settings` must be the same in a run that resumes; states of earlier versions have none. `contract` is
    that of the training file, None for sums of gradients. `is_run` is false for the state file of a training
    file, whose position is a number of updates.
    """

    position: Position
    arrays: Mapping[str, Array]
    optimizer: Mapping[str, Any] | None = field(default=None)
    settings: Mapping[str, Any] = field(default_factory=dict)
    contract: Mapping[str, Any] | None = None
    is_run: bool = True


def save_state(state: RunState, path: str | os.PathLike[str]) -> None:
    """Writes a state atomically.

    Raises:
        OutputFileError: the file cannot be written; an existing file is unchanged.
    """
    about = {
        "schema": SCHEMA,
        "version": __version__,
        "optimizer": state.optimizer,
        "settings": dict(state.settings),
        **asdict(state.position),
    }
    contract = {} if state.contract is None else metadata_of(state.contract)
    metadata = {_KEY: json.dumps(about), UPDATES_KEY: str(state.position.updates), **contract}
    write_arrays(state.arrays, metadata, path)


def load_state(path: str | os.PathLike[str]) -> RunState:
    """Reads a state: of a run, or the state file of a training file, which another program may have written.

    Raises:
        TrainingError: the file is missing or not a state.
    """
    name = os.fspath(path)
    try:
        arrays, metadata = read_arrays(name)
        if _KEY not in metadata and CONTRACT_KEY in metadata:
            contract_in(metadata)
            updates = int(metadata.get(UPDATES_KEY, 0))
            if not 0 <= updates < 2**62:
                raise ValueError(f"{UPDATES_KEY} is {updates}")
            return RunState(Position(updates, draws=updates), arrays, is_run=False)
        about = json.loads(metadata[_KEY])
        if about["schema"] != SCHEMA:
            raise TrainingError(
                f"'{name}' has schema {about['schema']} of a state, and this version reads {SCHEMA}; update onnxgc"
            )
        history = tuple(about["history"])
        whole = ("updates", "draws", "epoch", "batches", "samples", "seed", "batch")
        counts = {key: int(about[key]) for key in whole}
        position = Position(**counts, losses=float(about["losses"]), history=history)
        return RunState(position, arrays, about["optimizer"], dict(about.get("settings", {})))
    except FileNotFoundError:
        raise TrainingError(f"the state file '{name}' does not exist; omit resume to start a new run") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainingError(f"'{name}' is not the state of a run: {one_line(error)}; give a saved file") from error


def check_resumable(state: RunState, run: RunState, name: str, *, seed: int | None, drawn: Sequence[str]) -> None:
    """Checks that `run` can resume from `state`, which was read from the file `name`.

    `seed` is the seed that the user passed, `drawn` the names of weights drawn from the run's seed.

    Raises:
        TrainingError: arrays, optimizer, settings or seed differ.
    """
    _check_names(state, run, name)
    if state.is_run:
        _check_optimizer(state, run, name)
        _check_settings(state, run, name)
        _check_seed(state, run, name, seed, drawn)
    _check_arrays(state, run, name)


def _check_names(state: RunState, run: RunState, name: str) -> None:
    missing = [key for key in run.arrays if key not in state.arrays]
    unknown = [key for key in state.arrays if key not in run.arrays]
    if missing or unknown:
        what = f"it lacks '{missing[0]}'" if missing else f"it contains '{unknown[0]}'"
        raise TrainingError(
            f"the state '{name}' was saved with another optimizer or model: {what}; give the state of a run "
            "of this model and optimizer"
        )


def _check_optimizer(state: RunState, run: RunState, name: str) -> None:
    if json.loads(json.dumps(run.optimizer)) != state.optimizer:
        raise TrainingError(
            f"the state '{name}' was saved with the optimizer {_described(state.optimizer)}, and "
            f"this run has {_described(run.optimizer)}; give the same settings, or start from "
            "exported weights"
        )


def _described(optimizer: Mapping[str, Any] | None) -> str:
    """An optimizer and its settings in one line."""
    settings = dict(optimizer or {"name": "none"})
    name = settings.pop("name")
    return f"{name} ({', '.join(f'{key} {value}' for key, value in settings.items() if value)})"


def _check_settings(state: RunState, run: RunState, name: str) -> None:
    here: dict[str, Any] = {"batch": run.position.batch, **run.settings}
    saved = {"batch": state.position.batch or run.position.batch, **state.settings}
    # States of earlier versions lack settings, which then count as equal.
    compared = here if state.position.batches else _SETTINGS_OF_A_RUN if state.settings else ("batch",)
    for key in compared:
        if saved.get(key, here[key]) != here[key]:
            raise TrainingError(
                f"the state '{name}' was saved with {key} {saved[key]}, and this run has {key} {here[key]}; "
                "resume with the same, or start from exported weights"
            )


def _check_seed(state: RunState, run: RunState, name: str, seed: int | None, drawn: Sequence[str]) -> None:
    saved = state.position.seed
    if seed is not None and seed != saved:
        raise TrainingError(
            f"the state '{name}' was saved with seed {saved}, and this run has seed {seed}; omit the seed, "
            "or give the same"
        )
    untrained = [key for key in drawn if key not in state.arrays]
    if untrained and run.position.seed != saved:
        raise TrainingError(
            f"the state '{name}' was saved with seed {saved}, from which the frozen weight '{untrained[0]}' "
            "was drawn; give the same seed"
        )


def _check_arrays(state: RunState, run: RunState, name: str) -> None:
    for key, here in run.arrays.items():
        array = state.arrays[key]
        if array.shape != here.shape or array.dtype != here.dtype:
            raise TrainingError(
                f"'{key}' is {array.dtype.name} {list(array.shape)} in the state '{name}', and "
                f"{here.dtype.name} {list(here.shape)} in this run"
            )
