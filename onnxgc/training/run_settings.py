"""Settings of a run: learning rate, providers and the order of its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxgc.errors import TrainingError
from onnxgc.runtime.ort import PROVIDERS, default_providers
from onnxgc.training.data import ArrayData, Data
from onnxgc.training.learning_rates import Schedule, constant


def order_settings(data: Data) -> dict[str, Any]:
    """Settings that decide the position of a batch within its epoch."""
    return {"samples": data.samples, "shuffle": data.shuffle} if isinstance(data, ArrayData) else {}


def schedule_of(rate: float | Schedule) -> Schedule:
    if callable(rate):
        return rate
    try:
        return constant(checked_rate(float(rate)))
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"the learning rate is {rate!r}; give a number or a function of the number of previous updates"
        ) from error


def checked_rate(value: float) -> float:
    if not 0 <= value < float(np.finfo(np.float32).max):
        raise TrainingError(f"the learning rate is {value}; it must be a finite number of at least 0")
    return float(value)


def describe_optimizer(optimizer: Mapping[str, Any] | None) -> str:
    """An optimizer and its settings in one line."""
    settings = dict(optimizer or {"name": "none"})
    name = settings.pop("name")
    return f"{name} ({', '.join(f'{key} {value}' for key, value in settings.items() if value)})"


def providers_of(provider: str | None) -> tuple[tuple[str, ...], str]:
    """The providers of a session, and the device of its arrays."""
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
