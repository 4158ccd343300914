"""Plans on disk: one JSON file a problem, named by a hash of the problem, the planner's options and the versions."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onnxgc import __version__
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence
from onnxgc.emission.atomic_files import write_text
from onnxgc.torch.joint_problem import JointStep
from onnxgc.torch.plan_search import BudgetPlanner


@dataclass(frozen=True, slots=True)
class StoredPlanner:
    """Takes plans from a folder, and searches for those that are not there.

    Measured durations and workspaces differ between runs and are not in the key. So a plan is taken if its peak
    is no higher than when it was stored.
    """

    planner: BudgetPlanner
    folder: Path

    def __call__(
        self, step: JointStep, available_bytes: int, alike: Sequence[tuple[int, ...]] = ()
    ) -> tuple[tuple[int, ...], int]:
        """The stored sequence, or a new one.

        Raises:
            BudgetError: no sequence fits.
            OutputFileError: the file cannot be written.
        """
        path = self._path(step.problem)
        found = _read(path, step.problem)
        if found is None:
            found = self.planner(step, available_bytes, alike)
            peak = simulate_sequence(step.problem, found[0]).peak
            regular = simulate_sequence(step.problem, range(len(step.problem))).peak
            if self.planner.budget.is_least or peak <= self.planner.budget.bytes_of(regular):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_text(json.dumps([*found, peak], separators=(",", ":")), path)
        return found

    def _path(self, problem: OperatorProblem) -> Path:
        operators = [(one.name, one.reads, one.writes, one.may_repeat) for one in problem.operators]
        key = (self.planner, __version__, torch.__version__, operators, problem.sizes, sorted(problem.kept))
        return self.folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.json"


def _read(path: Path, problem: OperatorProblem) -> tuple[tuple[int, ...], int] | None:
    """The sequence of a file and the lower bound on its extra time; None if it is missing, damaged or too large."""
    try:
        sequence, bound, peak = json.loads(path.read_text(encoding="utf-8"))
        found = tuple(map(int, sequence)), int(bound)
        return found if simulate_sequence(problem, found[0]).peak <= int(peak) else None
    except (OSError, ValueError, TypeError, IndexError):
        return None
