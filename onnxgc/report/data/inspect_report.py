"""Figures of `inspect`."""

from typing import TypedDict


class WeightFigures(TypedDict):
    """A weight with its role, and the reason for it."""

    name: str
    shape: list[int]
    bytes: int
    role: str
    reason: str
    doubt: str


class OperatorFigures(TypedDict):
    """All uses of one operator in the forward graph."""

    operator: str
    gradient: str
    count: int
    nodes: list[str]
    flops: int


class PeakFigures(TypedDict):
    """A simulated peak, or None where an obstacle prevents planning."""

    simulated_peak_bytes: int | None


class FaultFigures(TypedDict):
    """A known fault of ONNX Runtime that the model triggers."""

    name: str
    nodes: list[str]
    cause: str
    levels: str
    versions: str
    detail: str


class CardFigures(TypedDict):
    """Expected costs of one operator in a step on a card; the last entry is the total."""

    operator: str
    nodes: int
    kernels: int
    moved_bytes: int
    flops: int
    slow_bytes: int
    seconds: float


class InspectReport(TypedDict):
    """The figures of `inspect --json`."""

    inputs: dict[str, list[int]]
    loss: str
    weights: list[WeightFigures]
    operators: list[OperatorFigures]
    regular: PeakFigures
    planned: PeakFigures
    opset: int | None
    left_to_the_cpu: dict[str, int]
    limits: dict[str, dict[str, int]]
    runtime_faults: list[FaultFigures]
    card: list[CardFigures]
    notes: list[str]
    obstacles: list[str]
