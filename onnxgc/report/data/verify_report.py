"""Figures of `verify`."""

from typing import TypedDict


class CheckFigures(TypedDict):
    """One check: whether it passed, and the observation."""

    name: str
    holds: bool
    detail: str


class MeasuredFigures(TypedDict):
    """Memory and time of one run."""

    measured_requested_bytes: int
    measured_in_use_bytes: int
    seconds: float
    threads: int | None


class VerifyReport(TypedDict):
    """The figures of `verify --json`; `planned_by_default` is None if a default session rejects the file."""

    holds: bool
    checks: list[CheckFigures]
    regular: MeasuredFigures
    planned: MeasuredFigures
    planned_by_default: MeasuredFigures | None
