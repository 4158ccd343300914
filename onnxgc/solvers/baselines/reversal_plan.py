"""A reversal schedule of a chain as the sequence of a step's operators."""

from collections import deque
from collections.abc import Iterable

from onnxgc.planning.joint_graph import vertex_of_operators
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import Operator
from onnxgc.planning.schedule_from_sequence import StepOperators
from onnxgc.solvers.reversal_schedule import Action, Advance, Backward, ReleaseState, Restore, Store, first_sweep_states


def reversal_plan(problem: CheckpointProblem, schedule: tuple[Action, ...]) -> CheckpointPlan:
    """The plan that runs a reversal schedule; its checkpoints are the states of the first sweep.

    State n is vertex n of the chain. The plan has no sequence if the step's operators are not sorted by
    vertex.
    """
    vertices = problem.graph.vertices
    states = first_sweep_states(schedule)
    plan = CheckpointPlan.for_graph(problem.graph, [vertices[state] for state in states])
    joint = problem.joint()
    positions = vertex_of_operators(joint.step, joint.members, vertices)
    if positions != sorted(positions):
        return plan
    sequence = _ReversalSequence(problem, positions).of(schedule)
    return CheckpointPlan(plan.checkpoints, keeps_last_segment=False, sequence=sequence)


class _ReversalSequence:
    """Runs the actions of a schedule on operators, and records which operators run.

    Live are the tensors of the stored states, of the current one, and of the state that backward
    differentiates next, which it may read. Any other tensor that an operator reads is recomputed, unless
    its operator runs only once.
    """

    def __init__(self, problem: CheckpointProblem, positions: list[int]) -> None:
        joint, vertices = problem.joint(), problem.graph.vertices
        step = joint.step
        self._named = StepOperators.from_step(step).operators
        self._outputs = set(step.outputs)
        self._producer = {name: operator for operator in step.forward for name in operator.outputs}
        self._members = [set(joint.members[vertex]) for vertex in vertices]
        self._forward: list[list[Operator]] = [[] for _ in vertices]
        self._backward: list[deque[Operator]] = [deque() for _ in vertices]
        position_of = {operator.name: position for operator, position in zip(step.forward, positions, strict=True)}
        for operator in step.forward:
            self._forward[position_of[operator.name]].append(operator)
        for chunk, source in zip(step.chunks, step.sources, strict=True):
            self._backward[position_of[source]].extend(chunk)
        self._names: list[str] = []
        self._has_run: set[str] = set()
        self._visited = 0
        self._stored: set[int] = set()
        self._next: int | None = None
        self._live: set[str] = set()

    def of(self, schedule: Iterable[Action]) -> tuple[str, ...]:
        self._visit(0)
        for action in schedule:
            match action:
                case Advance(start, stop):
                    for state in range(start + 1, stop + 1):
                        self._visit(state)
                case Store(state):
                    self._stored.add(state)
                case Restore(state):
                    self._release_others(self._members[state])
                case ReleaseState(state):
                    self._stored.remove(state)
                case Backward(number):
                    self._differentiate(number + 1, current=number)
        self._differentiate(0, current=0)
        return tuple(self._names)

    def _visit(self, state: int) -> None:
        """Compute a state from the one before it, and make it the current one."""
        if state == self._visited:
            self._compute_first(state)
            made = {name for operator in self._forward[state] for name in operator.outputs}
        else:
            self._provide(self._members[state])
            made = self._members[state]
        self._release_others(made)

    def _compute_first(self, state: int) -> None:
        self._visited += 1
        for operator in self._forward[state]:
            self._provide(operator.inputs)
            self._run(operator)

    def _differentiate(self, state: int, *, current: int) -> None:
        if state == self._visited:
            self._compute_first(state)
        for operator in self._backward[state]:
            self._provide(operator.inputs)
            self._run(operator)
        self._next = current
        self._release_others(self._members[current])
        # Before the next recomputation, backward runs as far as it can: that releases tensors.
        pending = self._backward[current]
        while pending and not any(map(self._is_missing, pending[0].inputs)):
            self._run(pending.popleft())

    def _provide(self, tensors: Iterable[str]) -> None:
        """Recompute the tensors that are not live, and those that they depend on."""
        pending = [name for name in reversed(tuple(tensors)) if self._is_missing(name)]
        while pending:
            operator = self._producer[pending[-1]]
            missing = [name for name in operator.inputs if self._is_missing(name)]
            if missing and not self._is_fixed(operator):
                pending.extend(missing)
                continue
            if self._is_missing(pending.pop()):
                self._run(operator)

    def _is_missing(self, name: str) -> bool:
        return name in self._producer and name not in self._live

    def _is_fixed(self, operator: Operator) -> bool:
        """Whether an operator has run and may not be recomputed; its outputs stay live in memory."""
        runs_once = operator.once or not self._outputs.isdisjoint(operator.outputs)
        return runs_once and operator.name in self._has_run

    def _run(self, operator: Operator) -> None:
        if operator.name in self._named and not self._is_fixed(operator):
            self._names.append(operator.name)
            self._has_run.add(operator.name)
        self._live.update(operator.outputs)

    def _release_others(self, current: set[str]) -> None:
        kept = self._stored if self._next is None else {*self._stored, self._next}
        self._live &= current.union(*(self._members[state] for state in kept))
