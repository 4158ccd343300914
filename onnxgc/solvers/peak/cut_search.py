"""The least simulated peak of a training step with at most one more forward.

The search space: an order of the vertices, and cuts in it (`onnxgc.solvers.peak.phase_memory`); the last
phase keeps every tensor. For one order the search is exact to one part in 20,000: the least bytes kept below
each cut such that no phase exceeds a limit are a shortest path, and the limit is bisected. Several orders
are searched (`onnxgc.graph.orders`). Local search on single vertices then improves the best plan
(`onnxgc.solvers.peak.local_search`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.orders import topological_orders
from onnxgc.planning.joint_graph import JointGraph
from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import StepGraph
from onnxgc.solvers.base import Finding, Solver, SolverOptions, deadline_of
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.peak.local_search import descend_peak
from onnxgc.solvers.peak.phase_memory import PhaseCosts, Waiting
from onnxgc.solvers.peak.step_model import StepModel, step_model
from onnxgc.solvers.plan_bounds import largest_working_set

logger = logging.getLogger(__name__)

_UNREACHABLE = np.iinfo(np.int64).max // 4
"""Bytes of a cut that no plan reaches within the limit."""
_MAX_EXACT_POSITIONS = 128
"""Up to this number of vertices, cuts with unusual waiting storages are followed too."""
_MAX_CUTS = 1024
"""Number of cuts in one order; a longer order is divided into parts, each with its cheapest cut."""
_MAX_CUTS_TIMES_POSITIONS = 1 << 24
_MAX_WAYS = 16
"""Number of ways to reach a cut that are distinguished when recomputation is minimised."""
_MAX_EVENTS = 300_000
"""Operators and slots evaluated by local search."""
_MAX_BITS = 58
"""Number of bits of the total of all sizes."""
_PRECISION = 20_000
"""Bisection of the limit ends at one part in this number."""


@dataclass(frozen=True, slots=True)
class _Label:
    """A way to reach a cut: bytes kept for lower phases, waiting storages, and the previous label."""

    cut: int
    kept_bytes: int
    waiting: Waiting
    before: _Label | None

    def path(self) -> list[_Label]:
        """The labels from the first cut to this one."""
        labels: list[_Label] = []
        label: _Label | None = self
        while label is not None and label.cut >= 0:
            labels.append(label)
            label = label.before
        return labels[::-1]


class OrderSearch:
    """The best cuts of one order of vertices."""

    def __init__(self, costs: PhaseCosts, deadline: float) -> None:
        self._costs = costs
        self._deadline = deadline
        self._positions = costs.model.positions
        self._cuts = costs.cuts

    def best(self, below: int, lower_bound: int, *, first: bool) -> tuple[int, list[int]] | None:
        """The least peak under `below` and its cuts; `None` if there is none.

        `lower_bound` is a lower bound on the peak. For the `first` order, `below` may be far too high.
        """
        low = lower_bound - 1  # No plan fits.
        # Low limits are fast: their phases are short.
        limit = max(lower_bound, below // 32) if first else below - 1
        while (best := self._cuts_under(min(limit, below - 1))) is None:
            if limit >= below - 1:
                return None
            low, limit = limit, limit + limit // 3 + 1
        while best[0] - low > 1 + best[0] // _PRECISION and time.perf_counter() < self._deadline:
            limit = (low + best[0]) // 2
            lower = self._cuts_under(limit)
            if lower is None:
                low = limit
            else:
                best = lower
        return best

    def _cuts_under(self, limit: int) -> tuple[int, list[int]] | None:
        label = self._under(limit)
        if label is None:
            return None
        peak = self._peak(label)
        if peak > limit:
            logger.debug("a path under %d bytes needs %d", limit, peak)
            return None
        return peak, [step.cut for step in label.path()]

    def least_recomputation(self, limit: int) -> list[int] | None:
        """Cuts within a feasible limit, with few recomputed operations.

        Each cut keeps up to `_MAX_WAYS` Pareto-optimal ways to reach it, by memory and operations, among
        those with the usual waiting storages; `None` if these do not suffice.
        """
        costs, positions = self._costs, self._positions
        # By cut + 1: rows of bytes kept, flops, previous cut (+ 1) and way to reach that.
        ways = np.full((positions, 4, _MAX_WAYS), _UNREACHABLE, np.int64)
        ways[0, :2, 0] = 0
        for cut in self._cuts:
            row = costs.row(cut, limit, ways[:, 0, 0])
            sources = np.arange(cut, cut - len(row.need), -1)
            kept = ways[sources, 0]
            fits = (kept + row.need[:, None] <= limit) & row.is_usual[:, None]
            if not fits.any():
                continue
            lower, way = np.nonzero(fits)
            total = kept[fits] + row.adds[lower]
            flops = ways[sources, 1][fits] + row.flops[lower]
            order = np.lexsort((flops, total))
            # A way that keeps more than another counts if it recomputes less.
            is_better = np.diff(np.minimum.accumulate(flops[order]), prepend=_UNREACHABLE) < 0
            best = order[is_better][:_MAX_WAYS]
            ways[cut + 1, :, : len(best)] = total[best], flops[best], sources[lower[best]], way[best]
        last = costs.last_row(limit)
        ends = np.arange(positions - 1, positions - 1 - len(last), -1)
        fits = ways[ends, 0] + last[:, None] <= limit
        if not fits.any():
            return None
        lower, way = np.nonzero(fits)
        index = int(np.argmin(ways[ends, 1][fits]))
        at, which = int(ends[lower[index]]), int(way[index])
        cuts: list[int] = []
        while at > 0:
            cuts.append(at - 1)
            at, which = int(ways[at, 2, which]), int(ways[at, 3, which])
        return cuts[::-1]

    def _peak(self, last: _Label) -> int:
        peak = last.kept_bytes + self._costs.last_phase(last.cut, last.waiting)
        for label in last.path():
            assert label.before is not None
            need, _ = self._costs.phase(label.before.cut, label.cut, label.before.waiting)
            peak = max(peak, label.before.kept_bytes + need)
        return peak

    def _under(self, limit: int) -> _Label | None:
        """The last label of a path on which no phase exceeds the limit."""
        start = _Label(-1, 0, frozenset(), None)
        # By cut + 1: all labels, and the bytes kept by the label with the usual waiting storages.
        labels: list[list[_Label]] = [[start], *([] for _ in range(self._positions - 1))]
        usual = np.full(self._positions, _UNREACHABLE, np.int64)
        usual[0] = 0
        unusual: set[int] = set()
        for cut in self._cuts:
            if time.perf_counter() >= self._deadline:
                return None
            kept = self._labels_at(cut, limit, labels, usual, unusual)
            labels[cut + 1] = kept
            for label in kept:
                if label.waiting == self._costs.usual_waiting(cut):
                    usual[cut + 1] = label.kept_bytes
                else:
                    unusual.add(cut)
        return self._ending(limit, labels)

    def _labels_at(
        self, cut: int, limit: int, labels: list[list[_Label]], usual: np.ndarray, unusual: set[int]
    ) -> list[_Label]:
        costs = self._costs
        row = costs.row(cut, limit, usual)
        width = len(row.need)
        below = usual[cut - width + 1 : cut + 1][::-1]
        total = below + row.adds
        reached: list[tuple[int, _Label]] = []
        fits = below + row.need <= limit
        likely = np.flatnonzero(fits & row.is_usual)
        least = _UNREACHABLE
        if len(likely):
            least = int(total[likely].min())
            reached.append((least, self._usual_label(labels, cut - 1 - int(likely[total[likely].argmin()]))))
        if not row.is_usual.all() and self._positions <= _MAX_EXACT_POSITIONS:
            spare = sum(costs.model.storages[s].size for s in costs.usual_waiting(cut))
            for k in np.flatnonzero(fits & ~row.is_usual & (total < least + spare)):
                reached.append((int(total[k]), self._usual_label(labels, cut - 1 - int(k))))
        for lower in unusual:
            if lower < cut - width:
                continue
            for label in labels[lower + 1]:
                if label.waiting == costs.usual_waiting(lower):
                    continue
                need, adds = costs.phase(lower, cut, label.waiting)
                if label.kept_bytes + need <= limit:
                    reached.append((label.kept_bytes + adds, label))
        kept: list[_Label] = []
        for kept_bytes, source in sorted(reached, key=lambda item: (item[0], item[1].cut)):
            waiting = costs.waiting_after(source.cut, cut, source.waiting)
            # A label that keeps no more, its additional waiting storages included, dominates.
            if any(
                other.kept_bytes + sum(costs.model.storages[s].size for s in other.waiting - waiting) <= kept_bytes
                for other in kept
            ):
                continue
            kept.append(_Label(cut, kept_bytes, waiting, source))
        return kept

    def _usual_label(self, labels: list[list[_Label]], cut: int) -> _Label:
        usual = self._costs.usual_waiting(cut)
        return next(label for label in labels[cut + 1] if label.waiting == usual)

    def _ending(self, limit: int, labels: list[list[_Label]]) -> _Label | None:
        """The label that keeps least among those from which the last phase fits."""
        row = self._costs.last_row(limit)
        best: _Label | None = None
        for k in range(len(row)):
            lower = self._positions - 2 - k
            for label in labels[lower + 1]:
                need = (
                    int(row[k])
                    if label.waiting == self._costs.usual_waiting(lower)
                    else self._costs.last_phase(lower, label.waiting)
                )
                if label.kept_bytes + need <= limit and (best is None or label.kept_bytes < best.kept_bytes):
                    best = label
        return best


def candidate_cuts(model: StepModel) -> list[int]:
    """All cuts of a small model; for a large one, the cheapest cut of each of at most `_MAX_CUTS` equal parts."""
    positions = model.positions
    change = [0] * (positions + 1)
    for position, last in enumerate(model.last_reader):
        size = sum(model.storages[s].size for s in model.storages_of[position])
        change[position] += size
        change[max(last, position)] -= size
    kept = list(accumulate(change))
    count = min(_MAX_CUTS, max(_MAX_CUTS_TIMES_POSITIONS // positions, 1))
    length = -(-(positions - 1) // count) or 1
    starts = range(0, positions - 1, length)
    return [min(range(start, min(start + length, positions - 1)), key=kept.__getitem__) for start in starts]


def plan_of_cuts(order: tuple[Vertex, ...], model: StepModel, cuts: Sequence[int]) -> CheckpointPlan:
    """The plan that keeps the tensors of all cuts, and every tensor after the last cut."""
    kept = {position for cut in cuts for position in range(cut + 1) if model.crosses(position, cut)}
    kept.update(range(cuts[-1] + 1 if cuts else 0, len(order)))
    return CheckpointPlan(tuple(order[position] for position in sorted(kept)), order, keeps_last_segment=False)


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Minimise the simulated peak: the best cuts over several orders, improved by local search.

    The result is at least as good as the baseline and the plan of the solver `acg`. For one order and one
    limit, a shortest path over at most `_MAX_CUTS` cuts with phases of at most `MAX_PHASE` positions.

    Args:
        problem: a problem with a joint graph, sizes in bytes.
        options: `objective` is `peak` or `activations`; `time_limit_seconds` and `progress` are used.
    """
    deadline = deadline_of(options)
    joint = problem.joint()
    if options.objective is Objective.ACTIVATIONS:
        joint = joint.without_parameter_gradients()
    bound = largest_working_set(joint.step)
    baseline = CheckpointPlan(problem.graph.vertices, keeps_last_segment=False)
    independent = ACG.search(problem, SolverOptions()).plan  # Fast enough for any time limit.
    peak, _, plan = min(
        (joint.profile(plan).peak_bytes, number, plan) for number, plan in enumerate((baseline, independent))
    )
    orders = topological_orders(problem.graph, problem.size_bytes)
    # Among cuts of equal peak, the search prefers little recomputation.
    scaled, unit = _within_int64(joint)
    searched = _search_orders(scaled, unit, orders, peak + 1, bound.bytes, options, deadline)
    for number, candidate in enumerate(dict.fromkeys(searched)):
        candidate_peak = joint.profile(candidate).peak_bytes
        if candidate_peak < peak or (candidate_peak == peak and number == 0 and plan is independent):
            peak, plan = candidate_peak, candidate
    status = Status.OPTIMAL if peak <= bound.bytes else Status.FEASIBLE
    kept = problem.graph.in_order(plan.checkpoints)
    return Finding(replace(plan, checkpoints=kept), status, min(bound.bytes, peak), bound.operator)


def _search_orders(
    joint: JointGraph,
    unit: int,
    orders: Sequence[tuple[Vertex, ...]],
    below: int,
    lower_bound: int,
    options: SolverOptions,
    deadline: float,
) -> list[CheckpointPlan]:
    """The best cuts of all orders, if below `below`, and the results of local search from several starts.

    One start has the model's own order of operators, which is not necessarily sorted by vertex.
    """
    best, least = -(-below // unit), lower_bound // unit
    plan: CheckpointPlan | None = None
    chosen: StepModel | None = None
    for number, order in enumerate(orders, start=1):
        if best <= least or time.perf_counter() >= deadline:
            break
        megabytes = best * unit / 10**6
        options.progress(f"planning: order {number} of {len(orders)}, {megabytes:,.0f} MB so far")
        model = step_model(joint.step_in(order), joint.members, order)
        search = OrderSearch(PhaseCosts(model, candidate_cuts(model)), deadline)
        lower = search.best(best, least, first=number == 1)
        logger.debug("order %s...: %s", order[:3], "nothing lower" if lower is None else f"{lower[0]} units")
        if lower is not None:
            best, chosen = lower[0], model
            plan = plan_of_cuts(order, model, search.least_recomputation(best) or lower[1])
    if best <= least:
        return [plan] if plan is not None else []
    own = CheckpointPlan(orders[0], keeps_last_segment=False)
    starts = [(step_model(joint.step, joint.members, orders[0]), own)]
    if plan is not None and chosen is not None:
        starts += [
            (starts[0][0], replace(own, checkpoints=plan.checkpoints)),
            (chosen, plan),
            (chosen, replace(plan, checkpoints=plan.order)),
        ]
    options.progress("planning: tensor by tensor")
    candidates = [plan] if plan is not None else []
    for model, start in starts:
        order = start.order or orders[0]
        position = {vertex: number for number, vertex in enumerate(order)}
        kept = descend_peak(model, (position[v] for v in start.checkpoints), _MAX_EVENTS // len(starts), deadline)[1]
        candidates.append(replace(start, checkpoints=tuple(order[number] for number in kept)))
    return candidates


def _within_int64(joint: JointGraph) -> tuple[JointGraph, int]:
    """The joint graph with sizes in a unit such that all sums fit into 64 bits, and the unit in bytes.

    The unit is a byte if possible; otherwise sizes are rounded up.
    """
    workspaces = (operator.workspace_bytes for operator in joint.step.forward)
    total = sum(joint.step.sizes.values()) + max(workspaces, default=0)
    unit = 1 << max(0, total.bit_length() - _MAX_BITS)
    if unit == 1:
        return joint, 1

    def scaled(step: StepGraph) -> StepGraph:
        return replace(step, sizes={name: -(-size // unit) for name, size in step.sizes.items()})

    return joint.mapped(scaled), unit


PEAK = Solver(
    name="peak",
    summary="least simulated peak with at most one more forward: the best cuts of several orders, improved",
    search=search,
    objectives=(Objective.PEAK, Objective.ACTIVATIONS),
)
