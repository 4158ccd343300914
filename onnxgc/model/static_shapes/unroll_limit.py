"""What all unrolling of steps has in common: how far it may go."""

from __future__ import annotations

from dataclasses import dataclass

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.ir import Node

# Beyond this a graph is too long for planning and for sessions.
LARGEST_UNROLLED = 100_000


@dataclass(slots=True)
class UnrollLimit:
    """How many operators unrolling has made so far."""

    taken: int = 0

    def take(self, node: Node, steps: int, operators: int) -> None:
        """Counts what a node's unrolled steps come to.

        Raises:
            UnsupportedOperatorError: with it, the unrolled graph grows too long.
        """
        self.taken += operators
        if self.taken > LARGEST_UNROLLED:
            raise UnsupportedOperatorError(
                f"{node.place} has {steps} steps, and unrolled the model would come to more than "
                f"{self.taken} operators, over the limit of {LARGEST_UNROLLED}; export it for shorter "
                "sequences, or pass --input-shapes with fewer steps"
            )
