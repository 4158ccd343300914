"""Small covering programs, solved by HiGHS."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

_MAX_PRESOLVED = 20_000
"""Weights of a program that is presolved: for larger covering programs presolving exceeds any time limit."""


@dataclass(frozen=True, slots=True)
class CoveringSolution:
    """A lower bound on the cost, values of the columns if any were found, and whether these are optimal."""

    bound: float
    values: np.ndarray | None
    optimal: bool


@dataclass(slots=True)
class CoveringProgram:
    """Least cost of columns such that the weighted sum of each row reaches its bound.

    Columns are 0 or 1, or any number from 0 up if they are `free`. Weights of a row may be negative.

    >>> program = CoveringProgram()
    >>> cheap, dear = program.column(1.0), program.column(3.0)
    >>> program.require([cheap, dear], [1.0, 1.0], 1.0)
    >>> program.solve(10.0).bound
    1.0
    """

    costs: list[float] = field(default_factory=list)
    free: list[bool] = field(default_factory=list)
    rows: list[tuple[ArrayLike, ArrayLike, float]] = field(default_factory=list)

    def column(self, cost: float, *, free: bool = False) -> int:
        self.costs.append(cost)
        self.free.append(free)
        return len(self.costs) - 1

    def require(self, columns: ArrayLike, weights: ArrayLike, at_least: float) -> None:
        self.rows.append((columns, weights, at_least))

    def solve(
        self,
        time_limit: float,
        *,
        start: ArrayLike | None = None,
        max_nodes: int | None = None,
        gap: float = 0.0,
        stop: Event | None = None,
        max_presolved: int = _MAX_PRESOLVED,
        relaxed: bool = False,
    ) -> CoveringSolution | None:
        """The best solution found within a time limit in seconds; `None` for none.

        `start` are values of the columns to begin from. `gap`
        is the distance to the optimum, as a share of it, at which the search ends; it also ends once `stop`
        is set, or at Ctrl-C. Programs with more than `max_presolved` weights are not presolved. `relaxed`:
        all columns are free, up to 1.
        """
        # Imported here: the import takes a while, and most of the tool does without.
        import highspy
        from highspy._core import _Highs

        # Not `highspy.Highs`, whose constructor prints a banner on standard output.
        highs = _Highs()
        for option, value in (
            ("output_flag", False),
            ("time_limit", max(time_limit, 0.01)),
            ("mip_rel_gap", gap),
            ("mip_abs_gap", 1e-9),
            ("threads", 1),
            ("random_seed", 0),
        ):
            highs.setOptionValue(option, value)
        if max_nodes is not None:
            highs.setOptionValue("mip_max_nodes", max_nodes)
        # A start is a solution already: presolving may then take the whole time limit.
        if start is None and sum(np.size(columns) for columns, _, _ in self.rows) > max_presolved:
            highs.setOptionValue("presolve", "off")
        program = self._program()
        if relaxed:
            program.integrality_ = []
        highs.passModel(program)
        if start is not None:
            first = highspy.HighsSolution()
            first.col_value = np.asarray(start, np.float64)
            highs.setSolution(first)
        _run(highs, stop or Event())
        return _solution(highs)

    def _program(self) -> Any:
        """The program as HiGHS reads it, with its rows in a sparse matrix."""
        import highspy

        program = highspy.HighsLp()
        infinity = highspy.kHighsInf
        lengths = [np.size(columns) for columns, _, _ in self.rows]
        program.num_col_, program.num_row_ = len(self.costs), len(self.rows)
        program.col_cost_ = np.asarray(self.costs, np.float64)
        program.col_lower_ = np.zeros(len(self.costs))
        program.col_upper_ = np.where(np.asarray(self.free, bool), infinity, 1.0)
        program.row_lower_ = np.asarray([bound for _, _, bound in self.rows], np.float64)
        program.row_upper_ = np.full(len(self.rows), infinity)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        program.a_matrix_.index_ = np.concatenate([columns for columns, _, _ in self.rows]).astype(np.int32)
        program.a_matrix_.value_ = np.concatenate([weights for _, weights, _ in self.rows]).astype(np.float64)
        kinds = highspy.HighsVarType
        program.integrality_ = [kinds.kContinuous if free else kinds.kInteger for free in self.free]
        return program


def _run(highs: Any, stop: Event) -> None:
    """Run a solver until it ends, `stop` is set, or Ctrl-C, which sets `stop`."""
    import highspy

    def interrupt(kind: Any, message: str, output: Any, reply: Any, data: Any) -> None:
        reply.user_interrupt = stop.is_set()

    highs.setCallback(interrupt, None)
    for kind in ("kCallbackMipInterrupt", "kCallbackSimplexInterrupt"):
        highs.startCallback(getattr(highspy._core.cb.HighsCallbackType, kind))
    # Python receives Ctrl-C while it waits for another thread, not inside the solver.
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(highs.run).result()
        except KeyboardInterrupt:
            stop.set()
            raise


def _solution(highs: Any) -> CoveringSolution | None:
    import highspy

    statuses = highspy.HighsModelStatus
    status = highs.getModelStatus()
    optimal = status == statuses.kOptimal
    if not optimal and status not in (statuses.kTimeLimit, statuses.kSolutionLimit, statuses.kInterrupt):
        return None
    best = highs.getSolution()
    values = np.asarray(best.col_value) if best.value_valid and len(best.col_value) else None
    info = highs.getInfo()
    # A linear program has no such bound, and its value is one if it is optimal.
    bound = info.mip_dual_bound if highs.getLp().integrality_ else info.objective_function_value
    return CoveringSolution(bound, values, optimal)
