"""Figures of `optimize`. Peaks and bounds include an optimizer's state."""

from typing import NotRequired, TypedDict


class TensorSum(TypedDict):
    """A number of tensors and their size."""

    count: int
    bytes: int


class TensorFigures(TypedDict):
    """A tensor and its size; `detail` says why it has no counterpart."""

    tensor: str
    bytes: int
    detail: NotRequired[str]


class RegularFigures(TypedDict):
    """The baseline."""

    activation_bytes: int
    simulated_peak_bytes: int
    simulated_activation_peak_bytes: int


class PlannedFigures(TypedDict):
    """The plan; operations are a share of the baseline's."""

    checkpoint_bytes: int
    heaviest_segment_bytes: int
    paper_objective_bytes: int
    simulated_peak_bytes: int
    simulated_activation_peak_bytes: int
    peak_step: str
    largest_at_peak: list[TensorFigures]
    extra_flops_ratio: float


class OptimizerFigures(TypedDict):
    """The optimizer whose updates the step contains."""

    name: str
    state_bytes: int


class TimeFigures(TypedDict):
    """Extra time and its lower bound as shares of the baseline's time, and the gap between them.

    `gap` is a share of the whole time, `gap_of_extra` of the extra time.
    """

    extra_time_ratio: float
    lower_bound_ratio: float
    gap: float
    gap_of_extra: float


class BudgetFigures(TimeFigures):
    """A budget of memory (`bytes`) or of extra time, and the plan for it."""

    bytes: int | None
    most_extra_time_ratio: float | None
    timing: str
    order: str
    order_alone_peak_bytes: int | None
    regular_seconds: float


class FrontierFigures(TimeFigures):
    """A point of the trade-off between extra time and peak."""

    budget_bytes: int
    simulated_peak_bytes: int
    status: str


class DeviceTotal(TypedDict):
    """The margin for a step's peak, and all memory of a device with it."""

    margin_bytes: int
    total_bytes: int


class DeviceFigures(TypedDict):
    """All memory that a step needs on a device beside its peak, and the device's memory if it was given."""

    device_bytes: int | None
    weight_bytes: int
    optimizer_state_bytes: int
    input_bytes: int
    runtime_bytes: int
    regular: DeviceTotal
    planned: DeviceTotal


class OptimizerPart(TypedDict, total=False):
    """Figures of a step with an optimizer."""

    optimizer: OptimizerFigures


class BudgetPart(TypedDict, total=False):
    """Figures of a plan with a budget."""

    budget: BudgetFigures
    frontier: list[FrontierFigures]


class BoundFigures(TypedDict):
    """The lower bound on the plan's objective; `bound_operator` is its working set's operator, or ""."""

    lower_bound_bytes: int
    bound_operator: str
    gap: float


class OptimizeReport(OptimizerPart, BudgetPart, BoundFigures):
    """The figures of `optimize --json`; `modules` are those of tensors and operators.

    `more_files` belong to the training file `output`: its state file and its evaluation file.
    """

    model: str
    output: str | None
    more_files: list[str]
    objective: str
    solver: str
    status: str
    loss: str
    vertices: int
    operators: int
    parameters: TensorSum
    regular: RegularFigures
    planned: PlannedFigures
    device_memory: DeviceFigures
    checkpoints: list[str]
    modules: dict[str, str]
    notes: list[str]
    seconds: dict[str, float]


class SizeFigures(TypedDict):
    """A size of a dimension with the fastest plan found for it; `per_second` are sizes a second."""

    size: int
    total_bytes: int
    extra_time_ratio: float
    seconds: float
    per_second: float


class LargestReport(TypedDict):
    """The largest size of a dimension on a device, and the trade-off up to it."""

    dimension: str
    device_bytes: int
    size: int
    points: list[SizeFigures]
