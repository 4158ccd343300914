"""What a training step of a small chain has in memory, storing everything and planned, as a plain SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.planning.schedule import Compute, Recompute, Release

_TENSORS = 9
_CHECKPOINTS = (0, 3, 6, 8)
_CELL = 17
_LEFT, _TOP, _BETWEEN, _BOTTOM = 44, 62, 34, 44
# Mid-tones that can be read on white and on black.
_INK, _GRID = "#7d8590", "#7d859033"
_FIRST, _AGAIN = "#2f81f7", "#d9822b"


@dataclass(frozen=True, slots=True)
class Cell:
    """A tensor that is held while a step runs; `again` where it is a second copy."""

    tensor: int
    step: int
    again: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """One way to run the chain: what is held when, how many steps it has, and how many are forward's."""

    title: str
    cells: tuple[Cell, ...]
    steps: int
    forward: int

    @property
    def peak(self) -> int:
        """Most tensors at once."""
        return max(sum(cell.step == step for cell in self.cells) for step in range(self.steps))


def panels() -> tuple[Panel, Panel]:
    """A chain of tensors of one size: the first is the input, the last the loss."""
    return (
        _panel("storing everything", range(_TENSORS)),
        _panel("two checkpoints between input and loss", _CHECKPOINTS),
    )


def _panel(title: str, kept: Sequence[int]) -> Panel:
    graph = ComputationGraph(tuple(range(_TENSORS)), tuple((v, v + 1) for v in range(_TENSORS - 1)))
    problem = CheckpointProblem(graph, dict.fromkeys(graph.vertices, TensorCost(1)))
    joint = problem.joint()
    row = {tensor: number for number, (tensor,) in enumerate(joint.members.values())}
    _, schedule = joint.scheduled(CheckpointPlan.for_graph(graph, kept))
    computing = [step for step in schedule.steps if not isinstance(step, Release)]

    def cells() -> Iterator[Cell]:
        held: dict[str, bool] = {}
        number = 0
        for step in schedule.steps:
            if isinstance(step, Release):
                for name in step.tensors:
                    del held[name]
                continue
            held.update(dict.fromkeys(step.operator.outputs, isinstance(step, Recompute)))
            for name, again in held.items():
                yield Cell(row[schedule.original_of.get(name, name)], number, again)
            number += 1

    forward = sum(isinstance(step, Compute) and step.chunk is None for step in computing)
    return Panel(title, tuple(cells()), len(computing), forward)


def draw() -> str:
    """The SVG: tensors downwards, the operators of one step to the right, a square where a tensor is held."""
    both = panels()
    width = _LEFT + sum(panel.steps for panel in both) * _CELL + _BETWEEN + 8
    height = _TOP + _TENSORS * _CELL + _BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">',
        f"<title>Which tensors of a chain are in memory during one training step: {both[0].title}, at most "
        f"{both[0].peak} at once; {both[1].title}, at most {both[1].peak}</title>",
    ]
    left = _LEFT
    for panel in both:
        lines += _drawn(panel, left)
        left += panel.steps * _CELL + _BETWEEN
    for tensor in range(_TENSORS):
        name = {0: "input", _TENSORS - 1: "loss"}.get(tensor, f"a{tensor}")
        y = _TOP + tensor * _CELL + 12
        lines.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{name}</text>')
    bottom = height - 8
    for x, colour, text in ((_LEFT, _FIRST, "in memory"), (_LEFT + 110, _AGAIN, "computed again")):
        lines.append(
            f'<rect x="{x}" y="{bottom - 10}" width="11" height="11" rx="2" fill="{colour}"/>'
            f'<text x="{x + 17}" y="{bottom}">{text}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _drawn(panel: Panel, left: int) -> Iterator[str]:
    right, bottom = left + panel.steps * _CELL, _TOP + _TENSORS * _CELL
    boundary = left + panel.forward * _CELL
    yield f'<text x="{left}" y="18" font-size="14">{panel.title}</text>'
    yield f'<text x="{left}" y="36">at most {panel.peak} of {_TENSORS} tensors at once</text>'
    yield f'<text x="{boundary - 5}" y="{_TOP - 6}" text-anchor="end">forward</text>'
    yield f'<text x="{boundary + 5}" y="{_TOP - 6}">backward</text>'
    yield (
        f'<rect x="{left}" y="{_TOP}" width="{right - left}" height="{bottom - _TOP}" fill="none" '
        f'stroke="{_GRID}"/>'
    )
    for cell in panel.cells:
        x, y = left + cell.step * _CELL + 1, _TOP + cell.tensor * _CELL + 1
        yield (
            f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}" rx="2" '
            f'fill="{_AGAIN if cell.again else _FIRST}"/>'
        )
    yield (
        f'<line x1="{boundary}" y1="{_TOP - 16}" x2="{boundary}" y2="{bottom}" stroke="{_INK}" '
        'stroke-dasharray="4 4"/>'
    )
