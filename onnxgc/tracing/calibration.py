"""Durations from what one machine took: measured operators, and rates for all others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from onnxgc.tracing.durations import Work

# What moves less says what it takes to start an operator, and no rate.
_SMALL_BYTES = 1 << 16
# From here on operators compute longer than they move data, on most machines.
_COMPUTING_FLOPS_PER_BYTE = 16
_MATRIX, _CONVOLUTION, _MOVING = "matrix products", "convolutions", "others"
_CLASS_OF = {
    "Einsum": _MATRIX,
    "Gemm": _MATRIX,
    "MatMul": _MATRIX,
    "Conv": _CONVOLUTION,
    "ConvTranspose": _CONVOLUTION,
}


@dataclass(frozen=True, slots=True)
class MeasuredOperator:
    """An operator and the median of what its runs took."""

    work: Work
    median_ns: int


@dataclass(frozen=True)
class Calibration:
    """What a model's forward operators took on one machine, by ONNX Runtime's own clock.

    `threads` is None where ONNX Runtime chose their number. Of an operator that was measured, the
    duration is what it took. Of another it follows from a measured relative (the same operator at
    other sizes; for a product in backward, the product that it differentiates) in proportion to the
    work, else from the rate of the same kind of operator, of its class, or of all.
    """

    model: str
    provider: str
    device: str
    threads: int | None
    onnxruntime: str
    runs: int
    operators: tuple[MeasuredOperator, ...]

    def duration_ns(self, work: Work) -> int:
        """Nanoseconds of one run of an operator."""
        if work.is_free:
            return 0
        relative = self._relative(work)
        if relative is not None:
            start = min(self.launch_ns, relative.median_ns)
            return round(start + (relative.median_ns - start) * _ratio(work, relative.work))
        for is_computing in (_computes(work), not _computes(work)):
            for key in _keys(work, is_computing):
                if key in self._rates:
                    return round(self.launch_ns + _amount(work, is_computing) / self._rates[key])
        return self.launch_ns

    def measured(self, work: Work) -> MeasuredOperator | None:
        """What was measured of the operator of that name and kind, at these sizes or others."""
        found = self._by_name.get(work.name)
        return found if found is not None and found.work.kind == work.kind else None

    @cached_property
    def launch_ns(self) -> int:
        """What the least operators take: the median of those that move next to nothing."""
        small = [found.median_ns for found in self.operators if found.work.moved_bytes < _SMALL_BYTES]
        return round(statistics.median(small)) if small else 0

    @cached_property
    def _by_name(self) -> Mapping[str, MeasuredOperator]:
        return {found.work.name: found for found in self.operators}

    @cached_property
    def _by_origin(self) -> Mapping[tuple[str, str], MeasuredOperator]:
        """The first operator of each family that stands for a node of the source model."""
        by_origin: dict[tuple[str, str], MeasuredOperator] = {}
        for found in self.operators:
            by_origin.setdefault((found.work.origin, _family_of(found.work)), found)
        return by_origin

    @cached_property
    def _rates(self) -> Mapping[_Key, float]:
        """Floating-point operations or bytes a nanosecond, over all that was measured of each key."""
        amounts: dict[_Key, int] = {}
        spent_ns: dict[_Key, int] = {}
        for found in self.operators:
            busy_ns = found.median_ns - self.launch_ns
            if found.work.moved_bytes < _SMALL_BYTES or busy_ns <= 0:
                continue
            is_computing = _computes(found.work)
            for key in _keys(found.work, is_computing):
                amounts[key] = amounts.get(key, 0) + _amount(found.work, is_computing)
                spent_ns[key] = spent_ns.get(key, 0) + busy_ns
        return {key: amount / spent_ns[key] for key, amount in amounts.items()}

    def _relative(self, work: Work) -> MeasuredOperator | None:
        """A measured operator that this one comes from, or that comes from the same node."""
        family = _family_of(work)
        candidates = (
            self._by_name.get(work.name),
            self._by_name.get(work.origin),
            self._by_origin.get((work.origin, family)),
        )
        for found in candidates:
            if found is None or _family_of(found.work) != family or found.work.dtype != work.dtype:
                continue
            if found.work.moved_bytes >= _SMALL_BYTES or _ratio(work, found.work) == 1:
                return found
        return None


# Kind or class of operator, element type, and whether the rate is one of computing or of moving data.
_Key = tuple[str, str, bool]


def _keys(work: Work, is_computing: bool) -> Iterator[_Key]:
    """What an operator's rate is looked for under, the nearest first."""
    yield work.kind, work.dtype, is_computing
    yield _class_of(work), work.dtype, is_computing
    yield "", work.dtype, is_computing
    yield "", "", is_computing


def _computes(work: Work) -> bool:
    return work.flops >= _COMPUTING_FLOPS_PER_BYTE * work.moved_bytes


def _amount(work: Work, is_computing: bool) -> int:
    return work.flops if is_computing else work.moved_bytes


def _class_of(work: Work) -> str:
    return _CLASS_OF.get(work.kind, _MOVING)


def _family_of(work: Work) -> str:
    """What an operator's relatives have in common with it: all products are one family."""
    return work.kind if _class_of(work) == _MOVING else "product"


def _ratio(work: Work, measured: Work) -> float:
    """How many times as much work one operator is as another of its family."""
    if _class_of(work) == _MOVING or not measured.flops:
        return work.moved_bytes / measured.moved_bytes
    return work.flops / measured.flops
