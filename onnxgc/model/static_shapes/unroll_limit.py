"""A limit on the number of operators that unrolling adds to a model."""

from __future__ import annotations

from dataclasses import dataclass

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.ir import Node

MAX_UNROLLED_OPERATORS = 100_000
"""Longer graphs are too slow to plan and to load into a session."""


@dataclass(slots=True)
class UnrollLimit:
    """Counts the operators that unrolling adds."""

    operators: int = 0

    def add(self, node: Node, steps: int, operators: int) -> None:
        """Adds the operators of a node's unrolled steps.

        Raises:
            UnsupportedOperatorError: the total exceeds `MAX_UNROLLED_OPERATORS`.
        """
        self.operators += operators
        if self.operators > MAX_UNROLLED_OPERATORS:
            raise UnsupportedOperatorError(
                f"{node.location} has {steps} steps; unrolled, the model would have at least "
                f"{self.operators} operators, over the limit of {MAX_UNROLLED_OPERATORS}; export it for "
                "shorter sequences, or pass --input-shapes with fewer steps"
            )
