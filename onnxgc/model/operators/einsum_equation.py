"""Einsum equations as labels of axes. Source: ONNX Einsum-12."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """The labels of each operand's axes, repeated ones included, and of the output's.

    The last axis under an ellipsis has the label `.0`, the one before it `.1`.
    """

    operands: tuple[Labels, ...]
    output: Labels
    sizes: Mapping[str, int]


def parse_equation(equation: str, shapes: Sequence[tuple[int, ...]]) -> Equation:
    """An equation applied to operands of these shapes.

    >>> parse_equation("...ij,jk", [(8, 2, 3), (3, 4)]).output
    ('.0', 'i', 'k')
    """
    operands, output = equation_labels(equation, [len(shape) for shape in shapes])
    sizes: dict[str, int] = {}
    for labels, shape in zip(operands, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            # An axis of 1 broadcasts over the others of its label.
            sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
    return Equation(operands, output, sizes)


def equation_labels(equation: str, ranks: Sequence[int]) -> tuple[tuple[Labels, ...], Labels]:
    """The labels of each operand's axes, and of the output's; `ranks` matter under an ellipsis only."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = tuple(_labels(term, rank) for term, rank in zip(left.split(","), ranks, strict=True))
    count = Counter(label for labels in operands for label in labels)
    broadcast = tuple(sorted((label for label in count if label[0] == "."), key=lambda x: -int(x[1:])))
    if arrow:
        before, dots, after = right.partition("...")
        return operands, (*before, *(broadcast if dots else ()), *after)
    once = sorted(label for label in count if count[label] == 1 and label[0] != ".")
    return operands, (*broadcast, *once)


def _labels(term: str, rank: int) -> Labels:
    before, dots, after = term.partition("...")
    covered = rank - len(before) - len(after) if dots else 0
    return (*before, *(f".{position}" for position in reversed(range(covered))), *after)
