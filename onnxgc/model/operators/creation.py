"""Facts about operators that create tensors: constants, shapes, ranges and random numbers."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgc.model.operators.facts import OperatorFacts, pointwise

FACTS: Mapping[str, OperatorFacts] = {
    "Bernoulli": pointwise(0),
    "Constant": OperatorFacts(flops=0),
    "ConstantOfShape": OperatorFacts(flops=0, has_gradient=False),
    "EyeLike": OperatorFacts(flops=0, has_gradient=False),
    "NonZero": OperatorFacts(flops=0, has_gradient=False),
    "OneHot": OperatorFacts(flops=0, independent=lambda place: place.index == 0, has_gradient=False),
    "RandomNormal": OperatorFacts(flops=0),
    "RandomNormalLike": pointwise(0, has_gradient=False),
    "RandomUniform": OperatorFacts(flops=0),
    "RandomUniformLike": pointwise(0, has_gradient=False),
    "Range": OperatorFacts(flops=0, has_gradient=False),
    "Shape": OperatorFacts(flops=0, has_gradient=False),
    "Size": OperatorFacts(flops=0, has_gradient=False),
}
