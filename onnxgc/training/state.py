"""The state of a run in one safetensors file, written atomically."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from onnxgc import __version__
from onnxgc.emission.atomic_files import write_bytes
from onnxgc.errors import OutputFileError, TrainingError
from onnxgc.model.core.ir import Array

SCHEMA = 1
_KEY = "onnxgc.training"


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

    def after(self, batches: int, samples: int, loss: float) -> Position:
        """The position after an update."""
        return replace(
            self,
            batches=self.batches + batches,
            samples=self.samples + samples,
            losses=self.losses + loss * samples,
        )

    def at_epoch(self, epoch: int, history: tuple[Mapping[str, Any], ...]) -> Position:
        return replace(self, epoch=epoch, batches=0, samples=0, losses=0.0, history=history)


@dataclass(frozen=True, slots=True)
class RunState:
    """Parameters, an optimizer's states and running statistics by name, and the position of the run.

    `settings` must be the same in a run that resumes; states of earlier versions have none.
    """

    position: Position
    arrays: Mapping[str, Array]
    optimizer: Mapping[str, Any] | None = field(default=None)
    settings: Mapping[str, Any] = field(default_factory=dict)


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
    arrays = {_as_stored(name): np.asarray(array, order="C") for name, array in state.arrays.items()}
    try:
        contents = save(arrays, {_KEY: json.dumps(about)})
    except SafetensorError as error:
        raise OutputFileError(f"cannot write '{os.fspath(path)}': {error}") from error
    write_bytes(contents, path)


def load_state(path: str | os.PathLike[str]) -> RunState:
    """Reads a state.

    Raises:
        TrainingError: the file is missing or not a state.
    """
    name = os.fspath(path)
    try:
        with safe_open(name, framework="numpy") as stored:
            about = json.loads((stored.metadata() or {})[_KEY])
            arrays = {_as_named(key): stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
        if about["schema"] != SCHEMA:
            raise TrainingError(
                f"'{name}' has schema {about['schema']} of a state, and this version reads {SCHEMA}; "
                "update onnxgc"
            )
        history = tuple(about["history"])
        whole = ("updates", "draws", "epoch", "batches", "samples", "seed", "batch")
        counts = {key: int(about[key]) for key in whole}
        position = Position(**counts, losses=float(about["losses"]), history=history)
        return RunState(position, arrays, about["optimizer"], dict(about.get("settings", {})))
    except FileNotFoundError:
        raise TrainingError(
            f"the state file '{name}' does not exist; omit resume to start a new run"
        ) from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise TrainingError(
            f"'{name}' is not the state of a run: {' '.join(str(error).split())}; give a saved file"
        ) from error


def _as_stored(name: str) -> str:
    """A name that safetensors accepts: it reserves __metadata__."""
    return f"_{name}" if re.fullmatch("__+metadata__", name) else name


def _as_named(key: str) -> str:
    return key[1:] if re.fullmatch("___+metadata__", key) else key
