"""Figures of `bench`."""

from typing import TypedDict

from onnxgc.report.data.optimize_report import OptimizerFigures


class ContenderFigures(TypedDict):
    """The baseline or the planned step; a figure that was not measured is None."""

    simulated_peak_bytes: int
    simulated_activation_peak_bytes: int
    measured_requested_bytes: int | None
    measured_in_use_bytes: int | None
    measured_activation_bytes: int | None
    best_seconds: float | None
    median_seconds: float | None
    step_seconds: list[float]
    samples_per_second: float | None
    failure: str | None


class BenchReport(TypedDict):
    """The figures of `bench --json`."""

    model: str
    inputs: dict[str, list[int]]
    batch: int
    provider: str
    device: str
    threads: int | None
    cores: int | None
    runs: int
    warm_up: int
    seed: int
    solver: str
    status: str
    optimizer: OptimizerFigures | None
    budget_bytes: int | None
    regular: ContenderFigures
    planned: ContenderFigures
    time_ratio: float | None
    extra_time_ratio: float | None
    predicted_extra_time_ratio: float
    timing: str
    versions: dict[str, str]
    notes: list[str]
