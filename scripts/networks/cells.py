"""Cells from architecture searches, as data.

A network is a chain of cells. Each cell reads the results of the two preceding cells.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scripts.networks.builder import Builder

Operation = Literal["skip", "avg 3x3", "max 3x3", "sep 3x3", "sep 5x5", "sep 7x7", "dil 3x3", "1x7 then 7x1"]
"""A skip connection, a pooling, or a convolution: separable, dilated, or a factorised 7x7."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The computation of a cell.

    States 0 and 1 are the results of the two preceding cells, the older one first. Step k computes state k +
    2, the sum of two operations, each given with the state that it reads. The result is the concatenation of
    the states in `outputs`. In a reduction cell, operations on states 0 and 1 have stride 2.
    """

    steps: tuple[tuple[tuple[Operation, int], tuple[Operation, int]], ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cells:
    """Result of a search: a cell that keeps the image size and a cell that halves it."""

    normal: Cell
    reduction: Cell


NASNET_A = Cells(
    normal=Cell(
        steps=(
            (("sep 5x5", 1), ("sep 3x3", 0)),
            (("sep 5x5", 0), ("sep 3x3", 0)),
            (("avg 3x3", 1), ("skip", 0)),
            (("avg 3x3", 0), ("avg 3x3", 0)),
            (("sep 3x3", 1), ("skip", 1)),
        ),
        outputs=(2, 3, 4, 5, 6),
    ),
    reduction=Cell(
        steps=(
            (("sep 5x5", 1), ("sep 7x7", 0)),
            (("max 3x3", 1), ("sep 7x7", 0)),
            (("avg 3x3", 1), ("sep 5x5", 0)),
            (("skip", 3), ("avg 3x3", 2)),
            (("sep 3x3", 2), ("max 3x3", 1)),
        ),
        outputs=(4, 5, 6),
    ),
)
"""Zoph et al., Learning Transferable Architectures for Scalable Image Recognition, 2018, Figure 4."""

AMOEBANET_A = Cells(
    normal=Cell(
        steps=(
            (("avg 3x3", 0), ("max 3x3", 1)),
            (("sep 3x3", 0), ("sep 5x5", 2)),
            (("sep 3x3", 0), ("avg 3x3", 3)),
            (("sep 3x3", 1), ("skip", 1)),
            (("skip", 0), ("avg 3x3", 1)),
        ),
        outputs=(4, 5, 6),
    ),
    reduction=Cell(
        steps=(
            (("avg 3x3", 0), ("sep 3x3", 1)),
            (("max 3x3", 0), ("sep 7x7", 2)),
            (("sep 7x7", 0), ("avg 3x3", 1)),
            (("max 3x3", 0), ("max 3x3", 1)),
            (("1x7 then 7x1", 0), ("sep 3x3", 5)),
        ),
        outputs=(3, 4, 6),
    ),
)
"""Real et al., Regularized Evolution for Image Classifier Architecture Search, 2019, Figure 5."""

DARTS = Cells(
    normal=Cell(
        steps=(
            (("sep 3x3", 0), ("sep 3x3", 1)),
            (("sep 3x3", 0), ("sep 3x3", 1)),
            (("sep 3x3", 1), ("skip", 0)),
            (("skip", 0), ("dil 3x3", 2)),
        ),
        outputs=(2, 3, 4, 5),
    ),
    reduction=Cell(
        steps=(
            (("max 3x3", 0), ("max 3x3", 1)),
            (("skip", 2), ("max 3x3", 1)),
            (("max 3x3", 0), ("skip", 2)),
            (("skip", 2), ("max 3x3", 1)),
        ),
        outputs=(2, 3, 4, 5),
    ),
)
"""Liu et al., DARTS: Differentiable Architecture Search, 2019, Figures 4 and 5 (second order)."""


@dataclass(frozen=True, slots=True)
class Features:
    """A tensor [N, channels, H, W] by its name."""

    name: str
    channels: int


def add_cell(
    net: Builder,
    cell: Cell,
    name: str,
    inputs: tuple[Features, Features],
    apply: Callable[[Operation, Features, int, int], str],
    width: int,
) -> Features:
    """Adds a cell and returns its result.

    Args:
        net: receives the nodes.
        cell: the computation.
        name: name of the result and prefix of the names of sums.
        inputs: states 0 and 1.
        apply: adds an operation on a state, given the state's number and the operation's position in the
        cell;
            its result has `width` channels.
        width: number of channels of all further states.
    """
    states = list(inputs)
    for step, pair in enumerate(cell.steps):
        left, right = (
            apply(operation, states[state], state, 2 * step + side) for side, (operation, state) in enumerate(pair)
        )
        states.append(Features(net.sum(left, right, f"{name}.state{step + 2}"), width))
    outputs = [states[state] for state in cell.outputs]
    return Features(net.concat([o.name for o in outputs], name), sum(o.channels for o in outputs))
