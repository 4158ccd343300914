"""The largest batch, resolution or sequence length that trains in the memory of a device."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import onnx

from onnxgc.api.budget_plans import DEFAULT_EXTRA_TIME, DEFAULT_SECONDS, BudgetRequest
from onnxgc.api.device_memory import DeviceMemory, parse_device_memory
from onnxgc.api.pipeline import OptimizeResult, optimize
from onnxgc.api.plan_options import Progress
from onnxgc.api.planned_step import trace_problem
from onnxgc.api.read_options import ReadOptions, read_with_options
from onnxgc.budget.from_step import problem_of
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.quick_search import quick_within
from onnxgc.budget.search import compile_repairs
from onnxgc.budget.size_search import SizePoint, largest_fitting
from onnxgc.errors import BudgetError, ModelFileError, OnnxgcError, PlanError, ShapeError
from onnxgc.model.files.load import load_proto, source_of
from onnxgc.planning.memory_budget import parse_extra_time
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.sequence_transfer import transferred_sequence
from onnxgc.report.data.optimize_report import LargestReport
from onnxgc.solvers.budget_solver import plan_of

_SECONDS_PER_SIZE = 5.0
_OTHER_GOALS = ("budget", "pareto", "plan", "solver", "objective", "checkpoints")
_OF_SEARCHES = (*_OTHER_GOALS, "order", "device", "calibrate", "time_limit", "step_limit", "seed")
"""Options of `optimize` that do not apply to a given plan."""
_INTERMEDIATE_POINTS = 3
"""Sizes of the trade-off between the largest without recomputation and the largest."""


@dataclass(frozen=True, slots=True)
class LargestSize:
    """The largest size that fits, the trade-off up to it, and the plan for it.

    Attributes:
        dimension: the input and the axes that have the size.
        device_bytes: the memory of the device.
        size: the largest size found.
        points: sizes with their plans, the smallest first; the last is the largest.
        result: the plan for the largest size, as `optimize` returns it.
    """

    dimension: str
    device_bytes: int
    size: int
    points: tuple[SizePoint, ...]
    result: OptimizeResult

    def as_json(self) -> LargestReport:
        """The figures, as `--json` writes them."""
        return {
            "dimension": self.dimension,
            "device_bytes": self.device_bytes,
            "size": self.size,
            "points": [
                {
                    "size": point.size,
                    "total_bytes": point.total_bytes,
                    "extra_time_ratio": point.extra_time_ratio,
                    "seconds": point.seconds,
                    "per_second": point.per_second,
                }
                for point in self.points
            ],
        }


def largest_size(
    source: Any,
    device_memory: str | float,
    output: str | os.PathLike[str] | None = None,
    *,
    dimension: str | None = None,
    extra_time: str | float | None = None,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress = lambda stage: None,
    **options: Any,
) -> LargestSize:
    """Find the largest batch that trains in the memory of a device, and plan it.

    Args:
        source: a model as for `optimize`.
        device_memory: all memory of the device, such as 8GiB, or its name.
        output: the training file to write for the largest size, if any.
        dimension: an input with its axes, such as `x:2,3` for a resolution; by default the batch.
        extra_time: the extra time allowed, as a share of the baseline's; 20% by default.
        input_shapes: other sizes of inputs, as for `optimize`.
        progress: receives a line for each stage.
        options: further options of `optimize`.

    Raises:
        BudgetError: not even the size 1 fits.
        ShapeError: the dimension is not one of the model.
    """
    if wrong := [name for name in _OTHER_GOALS if options.get(name)]:
        raise PlanError(
            f"{', '.join(wrong)} does not apply to the largest size, whose plan is within the memory of the "
            "device; leave it out"
        )
    given, shapes = source_of(source), dict(input_shapes or {})
    scaled = _Dimension.of(given, dimension, shapes)
    allowed = DEFAULT_EXTRA_TIME if extra_time is None else parse_extra_time(extra_time)
    device_bytes = parse_device_memory(device_memory)
    search = _Search(given, scaled, device_bytes, allowed, progress, options)
    compile_repairs(progress)
    size = search.largest()
    points = search.trade_off(size)
    progress(f"planning size {size:,}")
    how = {**options, "input_shapes": scaled.shapes_at(size), "progress": progress}
    limit = how.pop("time_limit", None)
    limit = DEFAULT_SECONDS if limit is None else limit
    try:
        result = optimize(given, output, device_memory=device_bytes, time_limit=limit, **how)
        is_slower = result.report["budget"]["extra_time_ratio"] > points[-1].extra_time_ratio
    except BudgetError:
        is_slower = True
    if is_slower:
        # A search for the least extra time may miss the plan by which the size was found.
        kept = {name: value for name, value in how.items() if name not in _OF_SEARCHES}
        result = optimize(given, output, plan=search.plans[size], **kept)
        result.report["device_memory"]["device_bytes"] = device_bytes
    return LargestSize(scaled.name, device_bytes, size, points, result)


@dataclass(frozen=True, slots=True)
class _Dimension:
    """Axes of inputs that have one size, that size, and the shapes of all inputs."""

    name: str
    axes: tuple[tuple[str, int], ...]
    size: int
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls, source: str | os.PathLike[str] | onnx.ModelProto, text: str | None, given: Mapping[str, Any]
    ) -> "_Dimension":
        """The axes of `text`, or the batch, with all others of the same name, or as long in the file."""
        graph = load_proto(source)[0].graph
        stored = {tensor.name for tensor in graph.initializer}
        declared = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in graph.input
            if value.name not in stored
        }
        shapes = {
            name: tuple(given.get(name) or (size if isinstance(size, int) and size else 1 for size in sizes))
            for name, sizes in declared.items()
        }
        if not shapes:
            raise ShapeError("the model has no inputs, so there is no size to change")
        chosen = _axes_of(text, shapes) if text else [(next(iter(shapes)), 0)]
        for name, axis in chosen:
            if axis >= len(shapes[name]):
                raise ShapeError(f"input '{name}' has no axis {axis}; its shape is {shapes[name]}")
        axes = dict.fromkeys(chosen)
        for name, axis in chosen:
            symbol = declared[name][axis] if axis < len(declared[name]) else 0
            for other, sizes in declared.items():
                for place, size in enumerate(sizes):
                    is_batch = axis == place == 0 or isinstance(symbol, str)
                    if is_batch and symbol and size == symbol:
                        axes[other, place] = None
        label = text or f"batch ({', '.join(dict.fromkeys(name for name, _ in axes))})"
        first, axis = chosen[0]
        return cls(label, tuple(axes), shapes[first][axis], shapes)

    def shapes_at(self, size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of all inputs with this size."""
        return {
            name: tuple(size if (name, axis) in self.axes else old for axis, old in enumerate(shape))
            for name, shape in self.shapes.items()
        }


def _axes_of(text: str, shapes: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    name, _, axes = text.rpartition(":")
    if name not in shapes or not all(axis.isdecimal() and axis.isascii() for axis in axes.split(",")):
        raise ShapeError(
            f"'{text}' is not a dimension; write an input and its axes, such as x:0 or x:2,3 "
            f"(inputs: {', '.join(shapes)})"
        )
    return [(name, int(axis)) for axis in axes.split(",")]


def _rounded(size: int) -> int:
    """The size without its low bits: gradients of odd batches are computed in many parts."""
    bits = max(0, size.bit_length() - 5)
    return size >> bits << bits


class _Search:
    def __init__(
        self,
        source: Any,
        dimension: _Dimension,
        device_bytes: int,
        allowed: Fraction,
        progress: Progress,
        options: Mapping[str, Any],
    ) -> None:
        self._source, self._dimension = source, dimension
        self._device_bytes, self._allowed = device_bytes, allowed
        self._progress = progress
        self._read = ReadOptions.from_options(
            options.get("loss", "auto"),
            options.get("trainable", ()),
            options.get("freeze", ()),
            options.get("freeze_bn", False),
            options.get("untie", False),
            options.get("optimizer"),
            options.get("provider"),
            keep_outputs=options.get("keep_outputs", False),
            loss_model=options.get("loss_model"),
            pools=options.get("pools") or "indices",
            portable=options.get("portable", False),
        )
        self._request = BudgetRequest.from_options(
            None, order="free", device=options.get("device"), calibrate=options.get("calibrate")
        )
        self._names: tuple[str, ...] = ()
        """The sequence of the last plan that recomputes."""
        self.plans: dict[int, CheckpointPlan] = {}
        """The plans of sizes that fit."""
        self._error: OnnxgcError | None = None
        """Why the model cannot be read at the last size that was too small or not possible."""
        self._points: dict[int, SizePoint | None] = {}
        self._needed: dict[int, int] = {}
        """By size: all memory of the baseline."""

    def largest(self) -> int:
        """The largest size that fits within the allowed time.

        Raises:
            BudgetError: there is none.
        """
        low = largest_fitting(lambda size: self._point(size) is not None, self._dimension.size)
        if low == 0:
            if self._error is not None:
                raise self._error
            raise BudgetError(
                f"no size of {self._dimension.name} fits {self._device_bytes:,} bytes with at most "
                f"{float(self._allowed):.0%} extra time; give more memory, or more --extra-time"
            )
        return low

    def trade_off(self, largest: int) -> tuple[SizePoint, ...]:
        """Points from the largest size without recomputation to the largest."""
        first = self._largest_plain(largest)
        step = max(1, (largest - first) // (_INTERMEDIATE_POINTS + 1))
        inner = {_rounded(size) for size in range(first + step, largest - step // 2, step)}
        found = [self._point(size) for size in sorted({first, *inner, largest}) if first <= size <= largest]
        return tuple(point for point in found if point is not None)

    def _largest_plain(self, largest: int) -> int:
        """A size near the largest at which the baseline fits, by its memory at the sizes that were tried."""
        known = sorted(self._needed.items())
        low = max(((size, need) for size, need in known if need <= self._device_bytes), default=None)
        high = min(((size, need) for size, need in known if need > self._device_bytes), default=None)
        if low is None or high is None:
            return min(1 if low is None else low[0], largest)
        share = (self._device_bytes - low[1]) / (high[1] - low[1])
        guess = low[0] + int(share * (high[0] - low[0]))
        return min(guess if self._point(guess) is not None else low[0], largest)

    def _point(self, size: int) -> SizePoint | None:
        if size not in self._points:
            self._progress(f"trying size {size:,}")
            try:
                self._points[size] = self._tried(size)
            except (ShapeError, ModelFileError) as error:
                self._error, self._points[size] = error, None
        return self._points[size]

    def _tried(self, size: int) -> SizePoint | None:
        model = read_with_options(self._source, self._read, self._dimension.shapes_at(size))
        traced = trace_problem(model, self._read.keep_outputs, self._read.optimizer)
        memory = DeviceMemory.of_step(traced.step)
        durations = self._request.durations(traced.step)[0]
        step = traced.problem.joint().step
        step_problem = problem_of(step, durations)
        problem = step_problem.problem
        baseline = simulate_sequence(problem, range(len(problem)))
        self._needed[size] = memory.total(baseline.peak)
        if memory.total(0) >= self._device_bytes:
            return None
        budget = memory.budget_within(self._device_bytes).bytes_of(baseline.peak)
        starts = []
        if (names := transferred_sequence(self._names, step)) is not None:
            number = {name: index for index, name in enumerate(step_problem.names)}
            starts.append([number[name] for name in names])
        best = quick_within(problem, budget, starts, seconds=_SECONDS_PER_SIZE)
        if best is None:
            return None
        found = simulate_sequence(problem, best)
        extra = found.duration - problem.duration
        if extra > self._allowed * problem.duration:
            return None
        self._names = step_problem.names_of(best)
        self.plans[size] = plan_of(traced.problem, step, step_problem, best)
        return SizePoint(size, memory.total(found.peak), extra / max(problem.duration, 1), found.duration / 1e9)
