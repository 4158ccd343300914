"""Figures of `compare`: plans for one model, for each of several models, or one network in several files."""

from typing import Any, Literal, NotRequired, TypedDict, final

from onnxgc.report.data.optimize_report import RegularFigures, TensorFigures, TensorSum


class PeakPosition(TypedDict):
    """The operator at the peak, its number in the step (from 1), and the number of operators."""

    peak_step: str
    peak_step_number: int
    steps: int


class PlanRow(PeakPosition):
    """A plan for a model; `kind` is solver, rule or plan."""

    name: str
    kind: str
    detail: str
    simulated_peak_bytes: int
    simulated_activation_peak_bytes: int
    share_of_regular: float
    peak_gap: float
    checkpoint_bytes: int
    heaviest_segment_bytes: int
    paper_objective_bytes: int
    extra_flops_ratio: float
    objective: str
    status: str
    objective_bytes: int
    lower_bound_bytes: int
    lower_bound_ratio: float | None
    gap: float
    solve_seconds: float | None
    checkpoints: list[str]
    extra_time_ratio: float
    best: bool


class OmittedRow(TypedDict):
    """A requested row that is missing."""

    name: str
    reason: str


class TensorFates(TypedDict):
    """A tensor that two plans treat differently, with its fate under each."""

    tensor: str
    bytes: int
    fates: list[str]


class DifferenceSide(PeakPosition):
    """One of two plans, compared with the other."""

    name: str
    simulated_peak_bytes: int
    largest_at_peak: list[TensorFigures]
    kept_here_only: list[TensorFigures]
    computed_again_here_only: list[TensorFigures]


class DifferenceReport(TypedDict):
    """The difference between two plans for one model."""

    plans: list[DifferenceSide]
    tensors: list[TensorFates]
    kept_by_both: int
    computed_again_by_both: int
    peak_change_bytes: int
    modules: dict[str, str]


class BaselineFigures(RegularFigures):
    """The baseline of a comparison."""

    seconds: float


@final
class PlansReport(TypedDict):
    """Plans for one model, the lowest peak first."""

    kind: Literal["plans"]
    model: str
    loss: str
    inputs: dict[str, list[int]]
    vertices: int
    operators: int
    timing: str
    regular: BaselineFigures
    lower_bound_bytes: int
    bound_operator: str
    modules: dict[str, str]
    rows: list[PlanRow]
    budget_bytes: int | None
    left_out: list[OmittedRow]
    difference: DifferenceReport | None
    notes: list[str]
    seconds: NotRequired[float]


@final
class FailedReport(TypedDict):
    """A model that cannot be compared."""

    kind: Literal["plans"]
    model: str
    error: str


class EachReport(TypedDict):
    """Plans for each of several models."""

    kind: Literal["each"]
    comparisons: list[PlansReport | FailedReport]
    seconds: NotRequired[float]


class PeakFigures(TypedDict):
    """A peak, its operator and its largest tensors."""

    simulated_peak_bytes: int
    peak_step: str
    largest_at_peak: list[TensorFigures]


class PlannedFilePeak(PeakFigures):
    """The peak of a file under its plan."""

    solver: str
    checkpoints: int
    checkpoint_bytes: int


class FileReport(TypedDict):
    """One file of a network; `is_rebatched` if it was read with another batch size."""

    model: str
    inputs: dict[str, list[int]]
    vertices: int
    operators: int
    read_by_backward: TensorSum
    regular: PeakFigures
    planned: PlannedFilePeak
    modules: dict[str, str]
    is_rebatched: bool
    notes: list[str]


class NetworkDifference(TypedDict):
    """A property in which two files differ."""

    what: str
    a: str
    b: str


class CheckpointFates(TypedDict):
    """Checkpoints of a file's own plan, by their fate in the other file."""

    count: int
    same_tensor: int
    kept_by_both: int
    ambiguous: list[str]
    one_side: list[str]
    parted: list[str]


class Extra(TypedDict):
    """Operators of one kind that the files have in different numbers."""

    kind: str
    count_a: int
    count_b: int
    bytes_a: int
    bytes_b: int


class TransferredPlan(TypedDict):
    """The first file's plan in the other file.

    `as_it_is_simulated_peak_bytes` is the peak before the plan was adapted.
    """

    checkpoints: int
    is_without_sequence: bool
    lost: list[str]
    undecided: int
    decided: int
    overruled: int
    simulated_peak_bytes: int
    as_it_is_simulated_peak_bytes: int
    own_simulated_peak_bytes: int
    regular_simulated_peak_bytes: int


class PairReport(TypedDict):
    """The first file (a) and another one (b)."""

    a: str
    b: str
    is_same_network: bool
    has_same_biases: bool
    differences: list[NetworkDifference]
    matched_tensors: int
    rearranged_tensors: int
    multiplied_tensors: int
    checkpoints: dict[str, CheckpointFates]
    extras: list[Extra]
    read_by_backward_here_only: dict[str, list[TensorFigures]]
    part_behind: list[list[str]]
    operators_behind: list[list[list[str]]]
    meet_again_at: list[list[str]]
    carried_over: TransferredPlan


class NetworksReport(TypedDict):
    """One network in several files."""

    kind: Literal["networks"]
    files: list[FileReport]
    pairs: list[PairReport]
    seconds: NotRequired[float]


class GraphRow(TypedDict):
    """A plan for a bare graph, in the graph's units.

    `sum` is of checkpoints and heaviest segment, `overhead` the extra duration as a share of the baseline's.
    """

    name: str
    peak: float
    sum: float | None
    overhead: float | None
    lower_bound: float
    status: str
    checkpoints: list[Any] | None
    sequence: list[Any] | None
    seconds: float


class GraphReport(TypedDict):
    """Plans for a bare graph, the lowest peak first."""

    kind: Literal["graph"]
    model: str
    vertices: int
    baseline_peak: float
    rows: list[GraphRow]
    left_out: list[OmittedRow]
    seconds: NotRequired[float]
