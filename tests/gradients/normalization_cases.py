from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.model.core.ir import TrainableModel
from tests.gradients.gradient_case import Case, case, normal, operator, positive
from tests.gradients.reduction_cases import given


def _lrn(name: str, shape: tuple[int, ...], attributes: str) -> Case:
    # The large alpha makes the second term of the gradient as large as the first.
    return case("LRN", name, f"y = LRN<{attributes}>(x)", x=shape)


def _given_statistics(model: TrainableModel) -> TrainableModel:
    """BatchNormalization in inference mode, with running statistics."""
    running = {"scale": ("mean", "variance")}
    nodes = tuple(
        replace(node, inputs=(*node.inputs[:3], *running[node.inputs[1]]), rule="BatchNormalization")
        if node.op == "BatchNormalization"
        else node
        for node in model.nodes
        if not node.once
    )
    return replace(model, nodes=nodes, statistics=())


def _inference_norm(operands: Mapping[str, Tensor]) -> Tensor:
    mean, variance = (_statistic(name, operands["scale"].shape[0]) for name in ("mean", "variance"))
    return F.batch_norm(operands["x"], mean, variance, operands["scale"], operands["bias"], False, 0.0, 1e-3)


def _statistic(name: str, channels: int) -> Tensor:
    draw = positive(channels) if name == "variance" else normal(channels)
    return torch.from_numpy(draw.value("statistic", name)).double()


def _batch_norm(rule: str, name: str, shape: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    settings.setdefault("x", normal(*shape))
    return case(
        rule,
        name,
        f"y = {operator('BatchNormalization', attributes)}(x, scale, bias, mean, variance)",
        scale=positive(shape[1]),
        bias=(shape[1],),
        mean=_statistic("mean", shape[1]).float().numpy(),
        variance=_statistic("variance", shape[1]).float().numpy(),
        **settings,
    )


def _of_batch(name: str, shape: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    return _batch_norm("BatchNormalization.batch", name, shape, attributes, **settings)


def _given(name: str, shape: tuple[int, ...]) -> Case:
    return _batch_norm(
        "BatchNormalization", name, shape, "epsilon=0.001", change=_given_statistics, formula=_inference_norm
    )


def _layer(name: str, shape: tuple[int, ...], scale: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    """y = LayerNormalization(x, scale, bias), weighted so that the gradients of rows do not cancel."""
    settings.setdefault("x", normal(*shape))
    bias = settings.pop("bias", scale)
    operands = {"x": settings.pop("x"), "scale": positive(*scale)}
    operands |= {} if bias is None else {"bias": normal(*bias)}
    call = ", ".join(operands)
    body = settings.pop("body", f"n = {operator('LayerNormalization', attributes)}({call}) y = Mul(n, w)")
    return case("LayerNormalization", name, body, **operands, w=shape, frozen=("w",), **settings)


def _layer_formula(axis: int) -> Any:
    """A scale that broadcasts over a row, which torch's own function does not accept."""

    def formula(o: Mapping[str, Tensor]) -> Tensor:
        x = o["x"]
        n = F.layer_norm(x, x.shape[axis:], eps=1e-5) * o["scale"]
        return (n + o["bias"]) * o["w"]

    return formula


def _rows_statistics(o: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x = o["x"]
    mean = x.mean(-1, keepdim=True)
    inverse = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    return (x - mean) * inverse * o["scale"] + o["bias"], mean, inverse


def _all_three(o: Mapping[str, Tensor]) -> Tensor:
    n, mean, inverse = _rows_statistics(o)
    return n * o["w"] + mean.square() + inverse


_STATISTICS = "n, mean, inverse = LayerNormalization(x, scale, bias)"
LAYER_CASES = (
    _layer("tokens", (2, 3, 6), (6,), "axis=-1, epsilon=0.001"),
    _layer("axis 1 of four", (2, 3, 2, 4), (3, 2, 4), "axis=1, epsilon=0.1"),
    _layer("scale of one element", (4, 6), (1,), formula=_layer_formula(-1)),
    _layer("scale over the last axis of two", (2, 3, 6), (6,), "axis=1", formula=_layer_formula(1)),
    _layer("scale and bias of different shapes", (4, 6), (6,), bias=(1,), formula=_layer_formula(-1)),
    _layer("mean 30 times the deviation", (4, 8), (8,), x=normal(4, 8, mean=30.0)),
    _layer(
        "statistics read by the model",
        (4, 6),
        (6,),
        body=f"{_STATISTICS} a = Mul(n, w) b = Mul(mean, mean) c = Add(a, b) y = Add(c, inverse)",
        formula=_all_three,
    ),
    _layer(
        "inverse deviation read by the model",
        (4, 6),
        (6,),
        body='n, "", inverse = LayerNormalization(x, scale, bias) a = Mul(n, w) y = Add(a, inverse)',
        formula=lambda o: _rows_statistics(o)[0] * o["w"] + _rows_statistics(o)[2],
    ),
)


def _weighted(rule: str, name: str, call: str, shape: tuple[int, ...], **settings: Any) -> Case:
    """y = w call, so that the gradients of rows do not cancel."""
    operands = {"x": normal(*shape), "w": normal(*shape), **settings}
    return case(rule, name, f"n = {call} y = Mul(n, w)", frozen=("w",), **operands)


def _instance(name: str, shape: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    call = f"{operator('InstanceNormalization', attributes)}(x, scale, bias)"
    weights = {"scale": positive(shape[1]), "bias": normal(shape[1])}
    return _weighted("InstanceNormalization", name, call, shape, **weights, **settings)


def _group_formula(groups: int, epsilon: float) -> Any:
    def formula(o: Mapping[str, Tensor]) -> Tensor:
        each = o["x"].shape[1] // len(o["scale"])
        scale, bias = (o[name].repeat_interleave(each) for name in ("scale", "bias"))
        return F.group_norm(o["x"], groups, scale, bias, epsilon) * o["w"]

    return formula


def _group(name: str, shape: tuple[int, ...], groups: int, epsilon: float = 1e-5, per_group: bool = False) -> Case:
    """GroupNormalization, which reading decomposes; before opset 21 it has one scale per group."""
    count = groups if per_group else shape[1]
    attributes = f"num_groups={groups}" + (f", epsilon={epsilon}" if epsilon != 1e-5 else "")
    return _weighted(
        "GroupNormalization",
        name,
        f"GroupNormalization<{attributes}>(x, scale, bias)",
        shape,
        scale=positive(count),
        bias=(count,),
        opset=18 if per_group else 21,
        formula=_group_formula(groups, epsilon),
    )


def _rms_formula(axis: int, epsilon: float) -> Any:
    def formula(o: Mapping[str, Tensor]) -> Tensor:
        x = o["x"]
        axes = tuple(range(axis % x.ndim, x.ndim))
        return x * (x.square().mean(axes, keepdim=True) + epsilon).rsqrt() * o["scale"] * o["w"]

    return formula


def _with_rms_normalization(axis: int, epsilon: float) -> Any:
    """The model with RMSNormalization, which reading would decompose, in place of LayerNormalization."""

    def change(model: TrainableModel) -> TrainableModel:
        nodes = tuple(
            node.with_changes(
                op="RMSNormalization", rule="RMSNormalization", attributes={"axis": axis, "epsilon": epsilon}
            )
            if node.op == "LayerNormalization"
            else node
            for node in model.nodes
        )
        return replace(model, nodes=nodes, opset=23)

    return change


def _rms(name: str, shape: tuple[int, ...], scale: tuple[int, ...], axis: int = -1, epsilon: float = 1e-5) -> Case:
    return _weighted(
        "RMSNormalization",
        name,
        f"LayerNormalization<axis={axis}>(x, scale)",
        shape,
        scale=positive(*scale),
        change=_with_rms_normalization(axis, epsilon),
        formula=_rms_formula(axis, epsilon),
    )


def _expanded_rms(name: str, shape: tuple[int, ...], scale: tuple[int, ...], axis: int = -1) -> Case:
    return _weighted(
        "RMSNormalization as its definition",
        name,
        f"RMSNormalization<axis={axis}>(x, scale)",
        shape,
        scale=positive(*scale),
        opset=23,
        formula=_rms_formula(axis, 1e-5),
    )


def _lp(name: str, shape: tuple[int, ...], attributes: str, axis: int, p: int, **settings: Any) -> Case:
    def formula(o: Mapping[str, Tensor]) -> Tensor:
        return F.normalize(o["x"], p, axis) * o["w"]

    call = f"{operator('LpNormalization', attributes)}(x)"
    return _weighted("LpNormalization", name, call, shape, formula=formula, **settings)


def _lp_of_zeros(p: int) -> Case:
    def formula(o: Mapping[str, Tensor]) -> Tensor:
        rows = o["v"][:1] / o["v"][:1].norm(p)
        return o["x"] + torch.cat([rows, o["v"][1:].detach()]) * o["w"]

    return case(
        "LpNormalization",
        f"a row of zeros, p {p}",
        f"n = LpNormalization<p={p}>(v) m = Mul(n, w) y = Add(x, m)",
        x=(2, 3),
        v=given((2, 3), 1.0, -2.0, 0.5, 0.0, 0.0, 0.0),
        w=(2, 3),
        frozen=("w",),
        formula=formula,
        smooth=False,
    )


def _mean_variance(name: str, shape: tuple[int, ...], axes: list[int] | None, opset: int) -> Case:
    call = "MeanVarianceNormalization" + (f"<axes={axes}>" if axes is not None else "")
    over = axes if axes is not None else [0, 2, 3]

    def formula(o: Mapping[str, Tensor]) -> Tensor:
        x = o["x"]
        deviation = x.var(over, unbiased=False, keepdim=True).sqrt()
        return (x - x.mean(over, keepdim=True)) / (deviation + 1e-9) * o["w"]

    return _weighted("MeanVarianceNormalization", name, f"{call}(x)", shape, opset=opset, formula=formula)


NORMALIZATION_CASES = (
    *LAYER_CASES,
    _instance("[N, C, H, W]", (2, 3, 4, 5), "epsilon=0.01"),
    _instance("mean 30 times the deviation", (2, 3, 4, 5), x=normal(2, 3, 4, 5, mean=30.0)),
    _group("a scale for each group", (2, 4, 3, 3), 2, per_group=True),
    _group("two groups", (2, 4, 3, 3), 2, 0.01),
    _group("5D", (2, 4, 2, 3, 2), 2),
    _rms("axis 1 of three", (2, 3, 4), (3, 4), 1, 0.1),
    _rms("scale over the last axis of two", (2, 3, 4), (4,), 1),
    _expanded_rms("axis 1", (2, 3, 6), (3, 6), 1),
    _lp("defaults", (3, 4), "", -1, 2),
    _lp("p 1, axis -2", (3, 4, 2), "p=1, axis=-2", -2, 1),
    _lp_of_zeros(1),
    _lp_of_zeros(2),
    _mean_variance("default axes", (2, 3, 4, 5), None, 13),
    _mean_variance("axes", (2, 3, 4), [0, 2], 13),
    _lrn("size 3", (2, 6, 4, 5), "size=3, alpha=0.9, beta=0.6, bias=1.5"),
    _lrn("size 5 beyond the channels", (2, 4, 3, 3), "size=5, alpha=0.9"),
    _of_batch("[N, C]", (6, 3)),
    _of_batch("[N, C, H, W]", (3, 4, 5, 6), "epsilon=0.01, momentum=0.8"),
    _of_batch("mean 30 times the deviation", (4, 3, 6, 5), x=normal(4, 3, 6, 5, mean=30.0)),
    _of_batch("opset 14, training", (3, 4, 5, 6), "training_mode=1", opset=14),
    _given("[N, C, H, W]", (3, 4, 5, 6)),
)
