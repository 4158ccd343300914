"""Facts about loss functions."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgc.model.operators.facts import OperatorFacts, Place, Settings


def _independent_loss(place: Place) -> bool:
    return place.index < 2 and (place.axis != 1 or place.index == 1)


FACTS: Mapping[str, OperatorFacts] = {
    "NegativeLogLikelihoodLoss": OperatorFacts(
        independent=_independent_loss, settings=Settings((1, 2), "weights of classes")
    ),
    "SoftmaxCrossEntropyLoss": OperatorFacts(
        independent=_independent_loss, settings=Settings((1, 2), "weights of classes")
    ),
}

LOSSES = frozenset(FACTS)
