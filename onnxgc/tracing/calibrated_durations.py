"""Durations from measurements on one machine: measured operators, and rates for all others."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from onnxgc.tracing.durations import Work

# The duration of operators that move less is launch overhead and gives no rate.
_MIN_RATED_BYTES = 1 << 16
# Operators with more operations per byte are compute-bound on most machines.
_COMPUTE_BOUND_FLOPS_PER_BYTE = 16
_MATRIX, _CONVOLUTION, _MOVING = "matrix products", "convolutions", "others"
_CLASS_OF = {"Einsum": _MATRIX, "Gemm": _MATRIX, "MatMul": _MATRIX, "Conv": _CONVOLUTION, "ConvTranspose": _CONVOLUTION}


@dataclass(frozen=True, slots=True)
class MeasuredOperator:
    """An operator and the median duration of its runs."""

    work: Work
    median_ns: int


@dataclass(frozen=True)
class Calibration:
    """Durations of a model's forward operators on one machine, as ONNX Runtime's profiler measured them.

    `threads` is None if ONNX Runtime chose their number. A measured operator has its measured duration. An
    unmeasured operator's duration is scaled by work from a measured relative (the same operator at other
    sizes; for a product in
    backward, the product that it differentiates), or else follows from the rate of its kind of operator, of
    its class, or of all operators.
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
        for is_compute in (_is_compute_bound(work), not _is_compute_bound(work)):
            for key in _keys(work, is_compute):
                if key in self._rates:
                    return round(self.launch_ns + _amount(work, is_compute) / self._rates[key])
        return self.launch_ns

    def measured(self, work: Work) -> MeasuredOperator | None:
        """The measurement of the operator of that name and kind, at any sizes."""
        found = self._by_name.get(work.name)
        return found if found is not None and found.work.kind == work.kind else None

    @cached_property
    def launch_ns(self) -> int:
        """Launch overhead: the median duration of operators that move almost no data."""
        small = [found.median_ns for found in self.operators if found.work.moved_bytes < _MIN_RATED_BYTES]
        return round(statistics.median(small)) if small else 0

    @cached_property
    def _by_name(self) -> Mapping[str, MeasuredOperator]:
        return {found.work.name: found for found in self.operators}

    @cached_property
    def _by_origin(self) -> Mapping[tuple[str, str], MeasuredOperator]:
        """The first operator of each family for each node of the source model."""
        by_origin: dict[tuple[str, str], MeasuredOperator] = {}
        for found in self.operators:
            by_origin.setdefault((found.work.origin, _family_of(found.work)), found)
        return by_origin

    @cached_property
    def _rates(self) -> "Mapping[_Key, float]":
        """Floating-point operations or bytes per nanosecond, over all measurements of each key."""
        amounts: dict[_Key, int] = {}
        spent_ns: dict[_Key, int] = {}
        for found in self.operators:
            busy_ns = found.median_ns - self.launch_ns
            if found.work.moved_bytes < _MIN_RATED_BYTES or busy_ns <= 0:
                continue
            is_compute = _is_compute_bound(found.work)
            for key in _keys(found.work, is_compute):
                amounts[key] = amounts.get(key, 0) + _amount(found.work, is_compute)
                spent_ns[key] = spent_ns.get(key, 0) + busy_ns
        return {key: amount / spent_ns[key] for key, amount in amounts.items()}

    def _relative(self, work: Work) -> MeasuredOperator | None:
        """A measured operator that this one derives from, or that derives from the same node."""
        family = _family_of(work)
        candidates = (
            self._by_name.get(work.name),
            self._by_name.get(work.origin),
            self._by_origin.get((work.origin, family)),
        )
        for found in candidates:
            if found is None or _family_of(found.work) != family or found.work.dtype != work.dtype:
                continue
            if found.work.moved_bytes >= _MIN_RATED_BYTES or _ratio(work, found.work) == 1:
                return found
        return None


# Kind or class of operator, element type, and whether the rate counts operations (else bytes).
_Key = tuple[str, str, bool]


def _keys(work: Work, is_compute: bool) -> Iterator[_Key]:
    """The keys of rates that apply to an operator, the most specific first."""
    yield work.kind, work.dtype, is_compute
    yield _class_of(work), work.dtype, is_compute
    yield "", work.dtype, is_compute
    yield "", "", is_compute


def _is_compute_bound(work: Work) -> bool:
    return work.flops >= _COMPUTE_BOUND_FLOPS_PER_BYTE * work.moved_bytes


def _amount(work: Work, is_compute: bool) -> int:
    return work.flops if is_compute else work.moved_bytes


def _class_of(work: Work) -> str:
    return _CLASS_OF.get(work.kind, _MOVING)


def _family_of(work: Work) -> str:
    """The family whose durations scale with one another: the kind of operator, or all products."""
    return work.kind if _class_of(work) == _MOVING else "product"


def _ratio(work: Work, measured: Work) -> float:
    """The work of an operator relative to a measured one of its family."""
    if _class_of(work) == _MOVING or not measured.flops:
        return work.moved_bytes / measured.moved_bytes
    return work.flops / measured.flops
