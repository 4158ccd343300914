"""Live tensors of a small chain during a training step, baseline and planned, as a plain SVG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.planning.schedule import Compute, Recompute, Release
from scripts.benchmarking.records import ROOT
from scripts.benchmarking.svg import INK, svg_document

PICTURE = ROOT / "docs" / "chain.svg"
_TENSORS = 9
_CHECKPOINTS = (0, 3, 6, 8)
_CELL = 17
_LEFT, _TOP, _BETWEEN, _BOTTOM = 44, 62, 34, 44
_GRID = "#7d859033"
_COMPUTED, _RECOMPUTED = "#2f81f7", "#d9822b"


@dataclass(frozen=True, slots=True)
class Cell:
    """A tensor that is live at a step."""

    tensor: int
    step: int
    is_recomputed: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """A schedule of the chain: live tensors, number of steps, and number of forward steps."""

    title: str
    cells: tuple[Cell, ...]
    steps: int
    forward: int

    @property
    def peak(self) -> int:
        """The most tensors live at once."""
        return max(sum(cell.step == step for cell in self.cells) for step in range(self.steps))


def panels() -> tuple[Panel, Panel]:
    """Both schedules of a chain of tensors of one size; the first tensor is the input, the last the loss."""
    return (_panel("baseline", range(_TENSORS)), _panel("two checkpoints between input and loss", _CHECKPOINTS))


def draw() -> str:
    """The SVG: tensors downwards, operators to the right, a square where a tensor is live."""
    both = panels()
    width = _LEFT + sum(panel.steps for panel in both) * _CELL + _BETWEEN + 8
    height = _TOP + _TENSORS * _CELL + _BOTTOM
    peaks = "; ".join(f"{panel.title}, at most {panel.peak}" for panel in both)
    title = f"Live tensors of a chain during one training step: {peaks} at once"
    lines: list[str] = []
    left = _LEFT
    for panel in both:
        lines += _drawn(panel, left)
        left += panel.steps * _CELL + _BETWEEN
    for tensor in range(_TENSORS):
        name = {0: "input", _TENSORS - 1: "loss"}.get(tensor, f"a{tensor}")
        y = _TOP + tensor * _CELL + 12
        lines.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{name}</text>')
    bottom = height - 8
    for x, colour, text in ((_LEFT, _COMPUTED, "in memory"), (_LEFT + 110, _RECOMPUTED, "recomputed")):
        lines.append(
            f'<rect x="{x}" y="{bottom - 10}" width="11" height="11" rx="2" fill="{colour}"/>'
            f'<text x="{x + 17}" y="{bottom}">{text}</text>'
        )
    return svg_document(width, height, title, lines)


def _panel(title: str, kept: Sequence[int]) -> Panel:
    graph = ComputationGraph(tuple(range(_TENSORS)), tuple((v, v + 1) for v in range(_TENSORS - 1)))
    problem = CheckpointProblem(graph, dict.fromkeys(graph.vertices, TensorCost(1)))
    joint = problem.joint()
    row = {tensor: number for number, (tensor,) in enumerate(joint.members.values())}
    _, schedule = joint.scheduled(CheckpointPlan.for_graph(graph, kept))
    computing = [step for step in schedule.instructions if not isinstance(step, Release)]

    def cells() -> Iterator[Cell]:
        live: dict[str, bool] = {}
        number = 0
        for step in schedule.instructions:
            if isinstance(step, Release):
                for name in step.tensors:
                    del live[name]
                continue
            live.update(dict.fromkeys(step.operator.outputs, isinstance(step, Recompute)))
            for name, is_recomputed in live.items():
                yield Cell(row[schedule.original_of.get(name, name)], number, is_recomputed)
            number += 1

    forward = sum(isinstance(step, Compute) and step.chunk is None for step in computing)
    return Panel(title, tuple(cells()), len(computing), forward)


def _drawn(panel: Panel, left: int) -> Iterator[str]:
    right, bottom = left + panel.steps * _CELL, _TOP + _TENSORS * _CELL
    boundary = left + panel.forward * _CELL
    yield f'<text x="{left}" y="18" font-size="14">{panel.title}</text>'
    yield f'<text x="{left}" y="36">at most {panel.peak} of {_TENSORS} tensors at once</text>'
    yield f'<text x="{boundary - 5}" y="{_TOP - 6}" text-anchor="end">forward</text>'
    yield f'<text x="{boundary + 5}" y="{_TOP - 6}">backward</text>'
    yield (
        f'<rect x="{left}" y="{_TOP}" width="{right - left}" height="{bottom - _TOP}" fill="none" stroke="{_GRID}"/>'
    )
    for colour, is_recomputed in ((_COMPUTED, False), (_RECOMPUTED, True)):
        live = {(cell.tensor, cell.step) for cell in panel.cells if cell.is_recomputed is is_recomputed}
        # One dashed line for the steps at which a tensor is live without a break; each dash is a square.
        runs = "".join(
            f"M{left + step * _CELL + 1} {_TOP + tensor * _CELL + _CELL / 2:g}h{(end - step) * _CELL - 2}"
            for tensor, step in sorted(live)
            if (tensor, step - 1) not in live
            for end in [next(number for number in count(step) if (tensor, number) not in live)]
        )
        if runs:
            yield f'<path stroke="{colour}" stroke-width="{_CELL - 2}" stroke-dasharray="{_CELL - 2} 2" d="{runs}"/>'
    yield (
        f'<line x1="{boundary}" y1="{_TOP - 16}" x2="{boundary}" y2="{bottom}" stroke="{INK}" stroke-dasharray="4 4"/>'
    )
