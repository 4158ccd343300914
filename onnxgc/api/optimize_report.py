"""The report of `optimize`."""

from collections.abc import Mapping

import onnx

from onnxgc.api.device_memory import DeviceMemory
from onnxgc.api.planned_step import PlannedStep
from onnxgc.model.core.ir import TrainableModel, dtype_name
from onnxgc.planning.plan import Objective, TimeCost
from onnxgc.planning.simulate import live_at_peak
from onnxgc.report.data.optimize_report import (
    BoundFigures,
    BudgetPart,
    DeviceFigures,
    OptimizeReport,
    OptimizerPart,
    TimeFigures,
)

MAX_LISTED = 10
"""Largest tensors at a peak to list."""


def optimize_report(
    planned: PlannedStep, name: str, output: str | None, seconds: Mapping[str, float]
) -> OptimizeReport:
    """The figures of a planned step for the model `name`, written to `output`; `seconds` are by stage."""
    state = planned.state_bytes
    problem, solution, objective = planned.traced.problem, planned.solution, planned.objective
    types, model = planned.step.types, planned.model
    live = live_at_peak(planned.schedule, planned.step.graph, planned.profile)[:MAX_LISTED]
    return {
        "model": name,
        "output": output,
        "more_files": [],
        "objective": solution.objective.value,
        "solver": solution.solver,
        "status": solution.status.value,
        "loss": model.loss_kind,
        "vertices": len(problem.graph.vertices),
        "operators": len({node.origin for node in model.nodes}),
        "parameters": {
            "count": len(planned.step.parameter_gradients),
            "bytes": sum(types[parameter].size_bytes for parameter in planned.step.parameter_gradients),
        },
        "regular": {
            "activation_bytes": problem.total_bytes,
            "simulated_peak_bytes": planned.regular_profile.peak_bytes + state,
            "simulated_activation_peak_bytes": planned.regular_profile.activation_peak_bytes,
        },
        "planned": {
            "checkpoint_bytes": objective.checkpoint_bytes,
            "heaviest_segment_bytes": objective.heaviest_segment_bytes,
            "paper_objective_bytes": objective.total_bytes,
            "simulated_peak_bytes": planned.profile.peak_bytes + state,
            "simulated_activation_peak_bytes": planned.profile.activation_peak_bytes,
            "peak_step": planned.profile.peak_operator,
            "largest_at_peak": [{"tensor": tensor, "bytes": size} for tensor, size in live],
            "extra_flops_ratio": planned.extra_flops_ratio,
        },
        "device_memory": _device_memory(planned),
        **_optimizer_figures(planned),
        **_time_figures(planned),
        **_bound_figures(planned),
        "checkpoints": list(map(str, solution.plan.checkpoints)),
        "modules": planned.modules_of([solution.bound_operator, *dict(live)]),
        "notes": [*model.notes, *_notes_on_types(model), *planned.notes, *_notes_on_peak(planned)],
        "seconds": dict(seconds),
    }


def _bound_figures(planned: PlannedStep) -> BoundFigures:
    solution = planned.solution
    bound, gap = solution.lower_bound_bytes, solution.gap
    if solution.objective in (Objective.PEAK, Objective.TIME):
        bound += planned.state_bytes
    if solution.objective is Objective.PEAK and planned.state_bytes:
        peak = solution.objective_bytes + planned.state_bytes
        gap = max(0, peak - bound) / peak
    return {"lower_bound_bytes": bound, "bound_operator": solution.bound_operator, "gap": gap}


def _device_memory(planned: PlannedStep) -> DeviceFigures:
    memory = DeviceMemory.of_step(planned.step)
    baseline, peak = planned.regular_profile.peak_bytes, planned.profile.peak_bytes
    return {
        "device_bytes": planned.request.device_bytes,
        "weight_bytes": memory.weights,
        "optimizer_state_bytes": memory.optimizer_state,
        "input_bytes": memory.inputs,
        "runtime_bytes": memory.runtime,
        "regular": {"margin_bytes": memory.margin_of(baseline), "total_bytes": memory.total(baseline)},
        "planned": {"margin_bytes": memory.margin_of(peak), "total_bytes": memory.total(peak)},
    }


def _optimizer_figures(planned: PlannedStep) -> OptimizerPart:
    updates = planned.step.updates
    if updates is None:
        return {}
    return {"optimizer": {"name": updates.optimizer.name, "state_bytes": updates.state_bytes}}


def _time_figures(planned: PlannedStep) -> BudgetPart:
    """The figures of a plan with a budget."""
    cost = planned.solution.time
    if cost is None:
        return {}
    state = planned.state_bytes
    budget = planned.request.budget
    allowed = None if budget is None else budget.max_extra
    return {
        "budget": {
            "bytes": None if planned.budget_bytes is None else planned.budget_bytes + state,
            "most_extra_time_ratio": None if allowed is None else float(allowed),
            "timing": planned.timing,
            "order": planned.request.order.value,
            "order_alone_peak_bytes": None
            if planned.order_alone_peak_bytes is None
            else planned.order_alone_peak_bytes + state,
            "regular_seconds": cost.regular / 1e9,
            **_ratios(cost),
        },
        "frontier": [
            {
                "budget_bytes": point.budget_bytes + state,
                "simulated_peak_bytes": point.solution.objective_bytes + state,
                "status": point.solution.status.value,
                **_ratios(point.solution.time),
            }
            for point in planned.frontier
            if point.solution.time is not None
        ],
    }


def _ratios(cost: TimeCost) -> TimeFigures:
    return {
        "extra_time_ratio": cost.extra_ratio,
        "lower_bound_ratio": cost.lower_bound_ratio,
        "gap": cost.gap,
        "gap_of_extra": cost.gap_of_extra,
    }


def _notes_on_types(model: TrainableModel) -> list[str]:
    other = {model.types[name].dtype for name in model.parameters} - {onnx.TensorProto.FLOAT}
    if not other:
        return []
    names = ", ".join(sorted(dtype_name(dtype) for dtype in other))
    return [f"parameters are {names}; some runtimes lack kernels for types other than float32"]


def _notes_on_peak(planned: PlannedStep) -> list[str]:
    if planned.profile.peak_bytes < planned.regular_profile.peak_bytes or not planned.schedule.recomputed:
        return []
    return [
        "recomputation does not lower the peak, which is the working set of "
        f"'{planned.profile.peak_operator}'; --solver store-all avoids the extra time"
    ]
