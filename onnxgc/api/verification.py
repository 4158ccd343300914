"""Does a training file keep its promises: gradients, order, peak?"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.api.feeds import feeds_of, feeds_of_updates
from onnxgc.api.pipeline import (
    PlannedStep,
    ReadOptions,
    emit,
    optimize,
    plan_step_again,
    read_again,
    store_all_schedule,
)
from onnxgc.emission.plan_files import METADATA_KEY, is_plan_file, plan_from_json
from onnxgc.emission.write import write_model
from onnxgc.errors import ModelFileError, PlanError, RuntimeFailedError
from onnxgc.model.core.ir import Array
from onnxgc.model.core.stored_weights import StoredWeight
from onnxgc.model.files.lift_weights import draft_of
from onnxgc.model.files.load import load_proto, source_of
from onnxgc.model.weight_roles.initialization import draw_weights
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.runtime.execution_check import check_execution
from onnxgc.runtime.measure import Measurement, measure
from onnxgc.runtime.ort import SessionSettings

# A gradient this much smaller than the largest proves nothing when it is compared.
SMALLEST_GRADIENT_SHARE = 1e-6
# How far the loss of a session with default settings may be off.
STOCK_LOSS_TOLERANCE = 1e-2
# How much the loss may move, of itself, with parameters that have no effect: float32 rounding.
INVARIANCE_TOLERANCE = 1e-4
# How far the measured peak may be from the promised one.
PEAK_TOLERANCE = 0.01
# What the judge leaves out: a few bytes a node for barriers and shapes, and per-channel vectors.
_PEAK_ALLOWANCE_BYTES = 160 << 10
# And the buffer of each thread in a convolution.
_THREAD_BUFFER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: whether it held, and what was seen."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Verification:
    """All checks of one training file, and what was measured on the way.

    `planned_by_default` is missing where a session with default settings does not take the file.
    """

    checks: tuple[Check, ...]
    regular: Measurement
    planned: Measurement
    planned_by_default: Measurement | None

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        by_default = self.planned_by_default
        return {
            "holds": self.holds,
            "checks": [{"name": c.name, "holds": c.holds, "detail": c.detail} for c in self.checks],
            "regular": _measured(self.regular),
            "planned": _measured(self.planned),
            "planned_by_default": None if by_default is None else _measured(by_default),
        }


def _measured(measurement: Measurement) -> dict[str, Any]:
    return {
        "measured_requested_bytes": measurement.requested_peak_bytes,
        "measured_in_use_bytes": measurement.in_use_peak_bytes,
        "seconds": measurement.wall_seconds[-1],
        "threads": measurement.threads,
    }


def verify(
    model: Any,
    training: str | os.PathLike[str],
    *,
    seed: int = 0,
    threads: int | None = None,
    runs: int = 1,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    loss: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Run a training file beside the graph that stores everything, on ONNX Runtime's CPU provider.

    Both get the same weights (those of the file; drawn anew by `seed` where the file holds one
    repeated value), the same seeded inputs and the same session settings. In the place of a training file a
    plan file is taken as well: what `optimize` writes by it is verified, with these `input_shapes` and
    `loss`.

    Raises:
        ModelFileError: `training` was not written by onnxgc, or does not belong to `model`.
        OnnxgcError: `model` cannot be read.
    """
    model = source_of(model)
    tell = progress or (lambda stage: None)
    if is_plan_file(training):
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "training.onnx"
            optimize(
                model, made, plan=training, input_shapes=input_shapes, loss=loss, check=False, progress=tell
            )
            return verify(model, made, seed=seed, threads=threads, runs=runs, progress=progress)
    if input_shapes or loss != "auto":
        raise PlanError("shapes and loss are those of the training file; give them with a plan file alone")
    tell("reading")
    promised = _Promise.of(training)
    planned = _planned_again(model, promised)
    settings = SessionSettings(threads=threads)
    values = draw_weights(planned.model, seed, only_constant_filled=True)
    feeds = _feeds(planned, promised, values, seed)
    updates = planned.step.updates
    in_place = {} if updates is None else dict(updates.replaced)
    # A file with an optimizer returns no gradients: their sizes are those of one without.
    sized = planned if updates is None else _without_optimizer(planned, promised)
    sized_feeds = {
        name: value for name, value in feeds.items() if updates is None or name in sized.step.graph.resident
    }
    with tempfile.TemporaryDirectory() as folder:
        tell("emitting the graph that stores everything")
        regular_file = Path(folder) / "regular.onnx"
        sized_file = regular_file if updates is None else Path(folder) / "gradients.onnx"
        # Not held any longer: it has all weights in it.
        write_model(
            emit(planned, schedule=store_all_schedule(planned), values=promised.values).model, regular_file
        )
        tell("running the graph that stores everything")
        try:
            regular = measure(
                regular_file, feeds, settings=settings, runs=runs, keep_outputs=True, in_place=in_place
            )
            gradients = regular.outputs
            if updates is not None:
                write_model(
                    emit(sized, schedule=store_all_schedule(sized), values=promised.values).model, sized_file
                )
                gradients = measure(
                    sized_file, sized_feeds, settings=settings, runs=1, keep_outputs=True
                ).outputs
        except RuntimeFailedError as error:
            # Its file is gone when the error is read.
            text = str(error).replace(f"'{regular_file}'", "the graph that stores everything")
            raise RuntimeFailedError(text) from error
        tell("running the training file")
        measured = measure(
            training, feeds, settings=settings, runs=runs, keep_outputs=True, in_place=in_place
        )
        tell("running the training file in a session with default settings")
        stock: Measurement | RuntimeFailedError
        try:
            stock = measure(
                training,
                feeds,
                settings=SessionSettings(file_order=False, threads=threads),
                runs=runs,
                keep_outputs=[promised.loss],
                in_place=in_place,
            )
        except RuntimeFailedError as error:
            stock = error
        without_effect = _smallest(sized, gradients)
        loss_change, distance = 0.0, 0.0
        if without_effect:
            tell("moving the parameters whose gradients vanish")
            moves = _moves(without_effect, promised, feeds, seed)
            moved_feeds = {**sized_feeds, **{name: moved for name, (_, moved) in moves.items()}}
            with_gradients = training if updates is None else sized_file
            moved = measure(
                with_gradients, moved_feeds, settings=settings, runs=1, keep_outputs=[promised.loss]
            )
            loss_change = float(moved.outputs[promised.loss]) - float(gradients[promised.loss])
            distance = float(np.sqrt(sum(np.sum((new - old) ** 2) for old, new in moves.values())))
    expected, actual = regular.outputs, measured.outputs
    checks = (
        _loss_check(promised.loss, expected, actual),
        _gradient_check(planned, expected, actual),
        _size_check(sized, gradients, without_effect, loss_change, distance),
        _order_check(promised, measured),
        _peak_check(promised, measured),
        _stock_check(promised, expected, stock),
    )
    return Verification(checks, regular, measured, stock if isinstance(stock, Measurement) else None)


@dataclass(frozen=True, slots=True)
class _Promise:
    """What a training file says of itself."""

    proto: onnx.ModelProto
    plan: CheckpointPlan
    options: ReadOptions
    peak_bytes: int
    values: Mapping[str, Array]

    @property
    def loss(self) -> str:
        return str(self.proto.graph.output[0].name)

    @classmethod
    def of(cls, training: str | os.PathLike[str]) -> _Promise:
        proto, folder = load_proto(training)
        properties = {entry.key: entry.value for entry in proto.metadata_props}
        try:
            decision = plan_from_json(json.loads(properties[METADATA_KEY]), f"'{os.fspath(training)}'")
            options = ReadOptions.from_json(properties["onnxgc.options"])
            peak = int(properties["onnxgc.simulated_peak_bytes"])
        except (KeyError, ValueError, TypeError) as error:
            raise ModelFileError(
                f"'{os.fspath(training)}' was not written by onnxgc: its metadata lacks or garbles {error}; "
                "make it with `onnxgc optimize`"
            ) from error
        fed = {value.name for value in proto.graph.input}
        values = {
            tensor.name: StoredWeight(tensor, folder).load()
            for tensor in proto.graph.initializer
            if tensor.name in fed
        }
        return cls(proto, decision, options, peak, values)


def _planned_again(model: str | os.PathLike[str] | onnx.ModelProto, promised: _Promise) -> PlannedStep:
    shapes = {value.name: _shape(value) for value in promised.proto.graph.input}
    given = draft_of(*load_proto(model)).inputs
    read = read_again(model, promised.options, {name: shapes[name] for name in given if name in shapes})
    planned = plan_step_again(
        read,
        promised.plan,
        keep_outputs=promised.options.keep_outputs,
        optimizer=promised.options.optimizer,
    )
    outputs = [value.name for value in promised.proto.graph.output]
    different = set(planned.step.graph.outputs) ^ set(outputs)
    missing = [name for name in read.inputs if name not in shapes]
    if different or missing:
        name = min(different) if different else missing[0]
        raise ModelFileError(
            f"the training file belongs to another model: only one of them has the tensor '{name}'; "
            "give the model that it was made from"
        )
    return planned


def _without_optimizer(planned: PlannedStep, promised: _Promise) -> PlannedStep:
    """The same step with gradients in the place of updates, under a plan that stores everything."""
    everything = CheckpointPlan(planned.traced.problem.graph.vertices, keeps_last_segment=False)
    return plan_step_again(planned.model, everything, keep_outputs=promised.options.keep_outputs)


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _feeds(
    planned: PlannedStep, promised: _Promise, drawn: Mapping[str, Array], seed: int
) -> dict[str, Array]:
    """Inputs, labels and targets by seed; weights where they are drawn anew."""
    fed = {value.name for value in promised.proto.graph.input}
    feeds = feeds_of(planned, seed)
    constant = {
        name for name, value in promised.values.items() if value.size > 1 and np.all(value == value.flat[0])
    }
    feeds.update((name, value) for name, value in drawn.items() if name in fed and name in constant)
    return feeds_of_updates(planned, promised.values, seed) | feeds


def _loss_check(loss: str, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> Check:
    one, two = float(expected[loss]), float(actual[loss])
    if not np.isfinite(one):
        detail = f"{two!r}: {one!r} already where everything is stored, with these weights and random inputs"
        return Check("loss", False, detail)
    return Check("loss", one == two, f"{two!r}, storing everything {one!r}")


def _gradient_check(
    planned: PlannedStep, expected: Mapping[str, Array], actual: Mapping[str, Array]
) -> Check:
    names = [name for name in planned.step.graph.outputs if name != planned.model.loss]
    different = [name for name in names if not _identical(expected[name], actual[name])]
    if not different:
        count = len(planned.step.parameter_gradients)
        kind = "gradients" if planned.step.updates is None else "new parameters, all states"
        return Check("gradients", True, f"{count} {kind} and all statistics are bit-identical")
    worst = max(different, key=lambda name: _distance(expected[name], actual[name]))
    return Check(
        "gradients",
        False,
        f"{len(different)} of {len(names)} outputs differ, '{worst}' most: relative distance "
        f"{_distance(expected[worst], actual[worst]):.1e}",
    )


def _identical(expected: Array, actual: Array) -> bool:
    """Whether all elements are equal, or not a number in both."""
    if not np.issubdtype(expected.dtype, np.floating):
        return np.array_equal(expected, actual)
    return np.array_equal(expected, actual, equal_nan=True)


def _distance(expected: Array, actual: Array) -> float:
    scale = float(np.linalg.norm(expected.astype(np.float64))) or 1.0
    difference = float(np.linalg.norm(expected.astype(np.float64) - actual.astype(np.float64)))
    return difference / scale if np.isfinite(difference) else float("inf")


def _gradient_norms(planned: PlannedStep, outputs: Mapping[str, Array]) -> dict[str, float]:
    return {
        parameter: float(np.linalg.norm(outputs[gradient].astype(np.float64)))
        for parameter, gradient in planned.step.parameter_gradients.items()
    }


def _smallest(planned: PlannedStep, outputs: Mapping[str, Array]) -> tuple[str, ...]:
    """Parameters whose gradient is nothing beside the largest one."""
    norms = _gradient_norms(planned, outputs)
    limit = SMALLEST_GRADIENT_SHARE * max(norms.values())
    return tuple(name for name, norm in norms.items() if norm < limit)


def _moves(
    names: tuple[str, ...], promised: _Promise, feeds: Mapping[str, Array], seed: int
) -> dict[str, tuple[Array, Array]]:
    """Values of some parameters, and others near them.

    What is not zero keeps its sign: a scale has no effect in front of a normalisation as long as it
    is positive.
    """
    generator = np.random.default_rng(seed)
    values = {name: feeds[name] if name in feeds else promised.values[name] for name in names}
    moves: dict[str, tuple[Array, Array]] = {}
    for name, value in values.items():
        step = generator.standard_normal(value.shape)
        moved = np.where(value == 0, step, value * np.exp(0.2 * step)).astype(value.dtype)
        moves[name] = (value, moved)
    return moves


def _size_check(
    planned: PlannedStep,
    expected: Mapping[str, Array],
    small: tuple[str, ...],
    loss_change: float,
    distance: float,
) -> Check:
    """Gradients large enough that their equality says something.

    A gradient that vanishes is right only where the parameter has no effect, such as a bias that a
    batch normalisation behind it removes. So moving all such parameters by `distance` must change
    the loss by no more than so small a gradient allows, and rounding.
    """
    norms = _gradient_norms(planned, expected)
    largest = max(norms.values())
    others = {name: norm for name, norm in norms.items() if name not in small} or norms
    least = min(others, key=lambda name: others[name])
    detail = f"from {others[least]:.1e} ('{least}') to {largest:.1e}"
    if not np.isfinite(list(norms.values())).all():
        return Check("gradient sizes", False, f"{detail}, some are not finite")
    if not small:
        return Check("gradient sizes", True, detail)
    loss = abs(float(expected[planned.model.loss]))
    allowed = INVARIANCE_TOLERANCE * loss + SMALLEST_GRADIENT_SHARE * largest * distance
    holds = abs(loss_change) <= allowed
    effect = "without effect on the loss"
    if not holds:
        effect = f"vanishing, yet moving it changes the loss by {loss_change:.1e}"
    more = f" and {len(small) - 1} more" if len(small) > 1 else ""
    return Check("gradient sizes", holds, f"{detail}; '{small[0]}'{more} {effect}")


def _stock_check(
    promised: _Promise, expected: Mapping[str, Array], stock: Measurement | RuntimeFailedError
) -> Check:
    """The file in a session that knows nothing of onnxgc: it loads, runs, and recomputes."""
    if isinstance(stock, RuntimeFailedError):
        return Check("default session", False, str(stock))
    one, two = float(expected[promised.loss]), float(stock.outputs[promised.loss])
    # Fused kernels round otherwise.
    holds = abs(two - one) <= STOCK_LOSS_TOLERANCE * max(abs(one), 1.0)
    detail = f"loss {two!r}, {stock.in_use_peak_bytes / 1e6:.1f} MB in use"
    return Check("default session", holds, detail)


def _order_check(promised: _Promise, measured: Measurement) -> Check:
    found = check_execution(promised.proto, measured.steady.order)
    if found.lost:
        detail = f"{len(found.lost)} recomputed nodes did not run, the first '{found.lost[0]}'"
    elif found.moved:
        detail = f"node '{found.moved}' ran out of file order"
    else:
        detail = f"{found.executed} nodes ran in file order, {found.recomputed} of them again"
    return Check("order", found.holds, detail)


def _peak_check(promised: _Promise, measured: Measurement) -> Check:
    peak = measured.requested_peak_bytes
    threads = measured.threads or os.cpu_count() or 1
    allowance = _PEAK_ALLOWANCE_BYTES + threads * _THREAD_BUFFER_BYTES
    allowed = max(PEAK_TOLERANCE * promised.peak_bytes, allowance)
    holds = abs(peak - promised.peak_bytes) <= allowed
    return Check(
        "peak", holds, f"measured {peak / 1e6:.1f} MB requested, promised {promised.peak_bytes / 1e6:.1f} MB"
    )
