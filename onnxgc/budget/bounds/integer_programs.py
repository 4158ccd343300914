"""Small covering programs, solved by HiGHS."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

_MOST_PRESOLVED = 20_000
"""Weights of a program that is made smaller first: of larger ones that takes longer than any time limit."""


@dataclass(slots=True)
class CoveringProgram:
    """Least cost of columns such that each row's weights sum to at least 1.

    Columns are 0 or 1, or anything from 0 up where they are `free`. Weights of a row may be negative.
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

    def solved(
        self,
        time_limit: float,
        *,
        relaxed: bool = False,
        start: ArrayLike | None = None,
        most_nodes: int | None = None,
        gap: float = 0.0,
        stop: Event | None = None,
    ) -> CoveringSolution | None:
        """The best found within a time limit in seconds; `None` if that is nothing.

        `relaxed` solves the linear relaxation. `start` are values of the columns to begin from, `gap` is
        how much better than the best, as a share of it, a solution may be that is not looked for. Once
        `stop` is set, or at Ctrl-C, the search ends.
        """
        # Imported here: it takes a while, and most of the tool does without.
        import highspy
        from highspy._core import _Highs

        lengths = [np.size(columns) for columns, _, _ in self.rows]
        # Not `highspy.Highs`, which prints a banner on standard output when it is made.
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
        program = highspy.HighsLp()
        count = len(self.costs)
        infinity = highspy.kHighsInf
        program.num_col_, program.num_row_ = count, len(self.rows)
        program.col_cost_ = np.asarray(self.costs, np.float64)
        program.col_lower_ = np.zeros(count)
        program.col_upper_ = np.where(np.asarray(self.free, bool), infinity, 1.0)
        program.row_lower_ = np.asarray([bound for _, _, bound in self.rows], np.float64)
        program.row_upper_ = np.full(len(self.rows), infinity)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        program.a_matrix_.index_ = np.concatenate([columns for columns, _, _ in self.rows]).astype(np.int32)
        program.a_matrix_.value_ = np.concatenate([weights for _, weights, _ in self.rows]).astype(np.float64)
        if not relaxed:
            integer, continuous = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
            program.integrality_ = [continuous if free else integer for free in self.free]
        if most_nodes is not None:
            highs.setOptionValue("mip_max_nodes", most_nodes)
        # A start needs no haste: it is there whatever presolving takes.
        if start is None and sum(lengths) > _MOST_PRESOLVED:
            highs.setOptionValue("presolve", "off")
        highs.passModel(program)
        if start is not None:
            first = highspy.HighsSolution()
            first.col_value = np.asarray(start, np.float64)
            highs.setSolution(first)
        halt = stop or Event()

        def interrupt(kind: Any, message: str, output: Any, reply: Any, data: Any) -> None:
            reply.user_interrupt = halt.is_set()

        highs.setCallback(interrupt, None)
        for kind in ("kCallbackMipInterrupt", "kCallbackSimplexInterrupt"):
            highs.startCallback(getattr(highspy._core.cb.HighsCallbackType, kind))
        # Python hears of Ctrl-C while it waits, not while it runs the solver.
        with ThreadPoolExecutor(1) as beside:
            try:
                beside.submit(highs.run).result()
            except KeyboardInterrupt:
                halt.set()
                raise
        status = highs.getModelStatus()
        info = highs.getInfo()
        optimal = status == highspy.HighsModelStatus.kOptimal
        if relaxed:
            if not optimal:
                return None
            return CoveringSolution(
                info.objective_function_value, np.asarray(highs.getSolution().col_value), True
            )
        statuses = highspy.HighsModelStatus
        ended = (statuses.kTimeLimit, statuses.kSolutionLimit, statuses.kInterrupt)
        if not optimal and status not in ended:
            return None
        found = highs.getSolution()
        values = np.asarray(found.col_value) if found.value_valid and len(found.col_value) else None
        return CoveringSolution(info.mip_dual_bound, values, optimal)


@dataclass(frozen=True, slots=True)
class CoveringSolution:
    """A bound on the cost, the values of the columns if any were found, and whether they are optimal."""

    bound: float
    values: np.ndarray | None
    optimal: bool
