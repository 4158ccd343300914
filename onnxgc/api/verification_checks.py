"""The metadata of a training file, and its checks."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from onnxgc.api.device_memory import DeviceMemory
from onnxgc.api.planned_step import PlannedStep
from onnxgc.api.read_options import ReadOptions
from onnxgc.emission.plan_files import METADATA_KEY, plan_from_json
from onnxgc.emission.state_file import read_first_values
from onnxgc.errors import ModelFileError, RuntimeFailedError
from onnxgc.model.core.ir import Array
from onnxgc.model.core.stored_weights import StoredWeight
from onnxgc.model.files.load import load_proto
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.simulate import simulate
from onnxgc.runtime.execution_check import check_execution
from onnxgc.runtime.measure import Measurement
from onnxgc.tracing.step_graph import with_workspaces

# Gradients below this share of the largest are too small for a meaningful comparison.
MIN_GRADIENT_SHARE = 1e-6
# Relative tolerance of the loss in a session with default settings.
DEFAULT_LOSS_TOLERANCE = 1e-2
# Relative change of the loss by float32 rounding when parameters without effect move.
INVARIANCE_TOLERANCE = 1e-4
# Relative tolerance of the measured peak.
PEAK_TOLERANCE = 0.01
# Memory that the simulator ignores: a few bytes a node for barriers and shapes, and per-channel vectors.
_PEAK_ALLOWANCE_BYTES = 160 << 10
# Buffer of each thread in a convolution.
_THREAD_BUFFER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class TrainingMetadata:
    """The metadata of a training file."""

    proto: onnx.ModelProto
    plan: CheckpointPlan
    options: ReadOptions
    peak_bytes: int
    values: Mapping[str, Array]

    @property
    def loss(self) -> str:
        return str(self.proto.graph.output[0].name)

    @classmethod
    def from_file(cls, training: str | os.PathLike[str]) -> "TrainingMetadata":
        """Read a training file.

        Raises:
            ModelFileError: it was not written by onnxgc.
        """
        proto, folder = load_proto(training)
        properties = {entry.key: entry.value for entry in proto.metadata_props}
        try:
            decision = plan_from_json(json.loads(properties[METADATA_KEY]), f"'{os.fspath(training)}'")
            options = ReadOptions.from_json(properties["onnxgc.options"])
            peak = int(properties["onnxgc.simulated_peak_bytes"])
        except (KeyError, ValueError, TypeError) as error:
            raise ModelFileError(
                f"'{os.fspath(training)}' was not written by onnxgc: its metadata is missing or invalid "
                f"({error}); write it with `onnxgc optimize`"
            ) from error
        if not options.stores_state:
            return cls(proto, decision, options, peak, read_first_values(training))
        fed = {value.name for value in proto.graph.input}
        values = {
            tensor.name: StoredWeight(tensor, folder).load() for tensor in proto.graph.initializer if tensor.name in fed
        }
        return cls(proto, decision, options, peak, values)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: whether it passed, and the observation."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ParameterShift:
    """Parameters with vanishing gradients, and the change of the loss when they move by `distance`."""

    parameters: tuple[str, ...]
    loss_change: float = 0.0
    distance: float = 0.0


def loss_check(loss: str, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> Check:
    one, two = float(expected[loss]), float(actual[loss])
    if not np.isfinite(one):
        detail = f"{two!r}: the baseline has {one!r} already, with these weights and random inputs"
        return Check("loss", False, detail)
    return Check("loss", one == two, f"{two!r}, baseline {one!r}")


def gradient_check(planned: PlannedStep, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> Check:
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


def vanishing_gradients(planned: PlannedStep, outputs: Mapping[str, Array]) -> tuple[str, ...]:
    """Parameters whose gradient is negligible compared with the largest."""
    norms = _gradient_norms(planned, outputs)
    limit = MIN_GRADIENT_SHARE * max(norms.values())
    return tuple(name for name, norm in norms.items() if norm < limit)


def size_check(planned: PlannedStep, expected: Mapping[str, Array], shift: ParameterShift) -> Check:
    """Gradients are large enough for their comparison to be meaningful.

    A vanishing gradient is correct only if the parameter has no effect, like a bias before a batch
    normalisation. So moving all these parameters must not change the loss by more than their gradients and
    rounding allow.
    """
    norms = _gradient_norms(planned, expected)
    largest = max(norms.values())
    others = {name: norm for name, norm in norms.items() if name not in shift.parameters} or norms
    least = min(others, key=lambda name: others[name])
    detail = f"from {others[least]:.1e} ('{least}') to {largest:.1e}"
    if not np.isfinite(list(norms.values())).all():
        return Check("gradient sizes", False, f"{detail}, some are not finite")
    if not shift.parameters:
        return Check("gradient sizes", True, detail)
    loss = abs(float(expected[planned.model.loss]))
    allowed = INVARIANCE_TOLERANCE * loss + MIN_GRADIENT_SHARE * largest * shift.distance
    holds = abs(shift.loss_change) <= allowed
    effect = "without effect on the loss"
    if not holds:
        effect = f"vanishing, yet moving it changes the loss by {shift.loss_change:.1e}"
    more = f" and {len(shift.parameters) - 1} more" if len(shift.parameters) > 1 else ""
    return Check("gradient sizes", holds, f"{detail}; '{shift.parameters[0]}'{more} {effect}")


def device_check(memory: DeviceMemory, device_bytes: int, measured: Measurement) -> Check:
    """All memory of the step, with the arena's bytes in use, fits a device."""
    needed = memory.fixed_bytes + measured.in_use_peak_bytes
    detail = f"{needed / 1e6:.1f} MB with weights, inputs and runtime, device {device_bytes / 1e6:.1f} MB"
    return Check("device memory", needed <= device_bytes, detail)


def default_check(
    metadata: TrainingMetadata, expected: Mapping[str, Array], default: Measurement | RuntimeFailedError
) -> Check:
    """The file loads and runs in a session with default settings; its order there needs barriers."""
    if isinstance(default, RuntimeFailedError):
        return Check("default session", False, str(default))
    one, two = float(expected[metadata.loss]), float(default.outputs[metadata.loss])
    # Fused kernels round differently.
    holds = abs(two - one) <= DEFAULT_LOSS_TOLERANCE * max(abs(one), 1.0)
    detail = f"loss {two!r}, {default.in_use_peak_bytes / 1e6:.1f} MB in use"
    return Check("default session", holds, detail)


def order_check(metadata: TrainingMetadata, measured: Measurement) -> Check:
    execution = check_execution(metadata.proto, measured.steady.order)
    if execution.lost:
        detail = f"{len(execution.lost)} recomputed nodes did not run, the first '{execution.lost[0]}'"
    elif execution.moved:
        detail = f"node '{execution.moved}' ran out of file order"
    else:
        detail = f"{execution.executed} nodes ran in file order, {execution.recomputed} of them recomputed"
    return Check("order", execution.holds, detail)


def peak_check(metadata: TrainingMetadata, planned: PlannedStep, measured: Measurement) -> Check:
    peak, simulated = measured.requested_peak_bytes, metadata.peak_bytes
    if planned.model.provider != "cpu":
        # Kernels of the CPU, on which the file runs here, have workspaces of their own.
        simulated = simulate(with_workspaces(planned.schedule, planned.step), planned.step.graph).peak_bytes
    threads = measured.threads or os.cpu_count() or 1
    allowance = _PEAK_ALLOWANCE_BYTES + threads * _THREAD_BUFFER_BYTES
    allowed = max(PEAK_TOLERANCE * simulated, allowance)
    holds = abs(peak - simulated) <= allowed
    where = "" if simulated == metadata.peak_bytes else " on a CPU"
    detail = f"measured {peak / 1e6:.1f} MB requested, simulated {simulated / 1e6:.1f} MB{where}"
    return Check("peak", holds, detail)
