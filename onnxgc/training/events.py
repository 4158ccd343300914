"""Events of a training run, passed to callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
