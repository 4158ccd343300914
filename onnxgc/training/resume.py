"""Checks that a run can resume from a saved state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from onnxgc.errors import TrainingError
from onnxgc.training.run_settings import describe_optimizer
from onnxgc.training.state import RunState

_SETTINGS_OF_A_RUN = ("loss", "samples of an update")
"""Settings that are fixed for a whole run; within an epoch all settings are."""


def check_resumable(
    state: RunState, run: RunState, name: str, *, seed: int | None, drawn: Sequence[str]
) -> None:
    """Checks that `run` can resume from `state`, which was read from the file `name`.

    `seed` is the seed that the user passed, `drawn` the names of weights drawn from the run's seed.

    Raises:
        TrainingError: arrays, optimizer, settings or seed differ.
    """
    _check_names(state, run, name)
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
            f"the state '{name}' was saved with the optimizer {describe_optimizer(state.optimizer)}, and "
            f"this run has {describe_optimizer(run.optimizer)}; give the same settings, or start from "
            "exported weights"
        )


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
