import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.read import read_model
from tests.gradients.gradient_case import Case, Formula, case, wrong
from tests.model.model_helpers import assert_same_output, model_of, normal, read

_RUNTIME = ', "com.microsoft": 1'


def _case(
    rule: str, name: str, call: str, formula: Formula, x: tuple[int, ...] = (2, 4, 6), opset: int = 14, **inputs: Any
) -> Case:
    body = (call if " = " in call else f"y = {call}").replace("ms.", "com.microsoft.")
    return case(rule, f"{name}, opset {opset}", body, x=x, opset=opset, formula=formula, tolerance=1e-4, **inputs)


def _layer_norm(x: Tensor, g: Tensor, b: Tensor | None = None, epsilon: float = 1e-12) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], g, b, epsilon)


def _rms(x: Tensor, g: Tensor, epsilon: float, axes: int | tuple[int, ...] = -1) -> Tensor:
    return x / torch.sqrt((x * x).mean(axes, keepdim=True) + epsilon) * g


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _attended(operands: Iterable[Tensor], heads: int = 2, bias: Tensor | float = 0.0, scale: float = 0.0) -> Tensor:
    q, k, v = (_heads(part, heads) for part in operands)
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1])) + bias
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _projected(x: Tensor, o: Mapping[str, Tensor], *sizes: int) -> tuple[Tensor, ...]:
    return (x @ o["w"] + o["b"]).split(sizes or (6, 6, 6), -1)


_MASK = np.asarray([[1, 1, 0, 1], [1, 0, 0, 1]], np.int32)
_LENGTHS = np.asarray([3, 2], np.int32)
_CAUSAL = torch.triu(torch.full((4, 4), -10000.0), 1)
_LOW = torch.from_numpy((1.0 - _MASK) * -10000.0)[:, None, None, :]
_BY_LENGTH = torch.where(torch.arange(4) < torch.tensor([[3], [2]]), 0.0, -10000.0)[:, None, None, :]
_QKV: dict[str, Any] = {"w": (6, 18), "b": (18,)}


def _conv(o: Mapping[str, Tensor], **settings: int) -> Tensor:
    return F.conv2d(o["x"], o["w"], o.get("b"), **settings)


def _transposed_matmul(trans_a: int, batch_a: int, trans_b: int, batch_b: int) -> Case:
    """x: [2, 4, 6], and w in the shape for which x' w' is defined; ' transposes as the flags say."""

    def transposed(t: Tensor, is_transposed: int, moves_batch: int) -> Tensor:
        t = t.movedim(0, -2) if moves_batch else t
        return t.transpose(-1, -2) if is_transposed else t

    left = transposed(torch.zeros(2, 4, 6), trans_a, batch_a).shape
    shape = transposed(torch.zeros(left[0], left[-1], 5), trans_b, 0).shape
    shape = torch.zeros(shape).movedim(-2, 0).shape if batch_b else shape
    attributes = f"alpha=0.5, transA={trans_a}, transBatchA={batch_a}, transB={trans_b}, transBatchB={batch_b}"
    return _case(
        "FusedMatMul",
        f"{trans_a}{batch_a}{trans_b}{batch_b}",
        f"ms.FusedMatMul<{attributes}>(x, w)",
        lambda o: 0.5 * transposed(o["x"], trans_a, batch_a) @ transposed(o["w"], trans_b, batch_b),
        w=tuple(shape),
    )


def _activated(
    name: str, attributes: str, formula: Formula, opset: int = 14, w: tuple[int, ...] = (3, 4, 3, 3)
) -> Case:
    return _case("FusedConv", name, f"ms.FusedConv<{attributes}>(x, w)", formula, (2, 4, 5, 5), opset, w=w)


def _normalizations(opset: int) -> tuple[Case, ...]:
    sum_and_norm = 'z, "", "", t = ms.SkipLayerNormalization(x, s, g, b, c)  y = Mul(z, t)'
    skipped, weights = {"s": (2, 4, 6)}, {"g": (6,), "b": (6,)}
    return (
        _case(
            "SkipLayerNormalization",
            "epsilon",
            "ms.SkipLayerNormalization<epsilon=0.01>(x, s, g, b)",
            lambda o: _layer_norm(o["x"] + o["s"], o["g"], o["b"], 0.01),
            opset=opset,
            **skipped,
            **weights,
        ),
        _case(
            "SkipLayerNormalization",
            "bias and sum",
            sum_and_norm,
            lambda o: (total := o["x"] + o["s"] + o["c"]) * _layer_norm(total, o["g"], o["b"]),
            opset=opset,
            **skipped,
            **weights,
            c=(6,),
        ),
        _case(
            "SkipSimplifiedLayerNormalization",
            "epsilon",
            "ms.SkipSimplifiedLayerNormalization<epsilon=0.1>(x, s, g, b)",
            lambda o: _rms(o["x"] + o["s"] + o["b"], o["g"], 0.1),
            opset=opset,
            **skipped,
            **weights,
        ),
        *(
            _case(
                "SimplifiedLayerNormalization",
                f"axis {axis}",
                f"SimplifiedLayerNormalization<axis={axis}, epsilon=0.1>(x, g)",
                lambda o, axes=axes: _rms(o["x"], o["g"], 0.1, axes),  # type: ignore[misc]
                opset=opset,
                g=shape,
            )
            for axis, axes, shape in ((-1, -1, (6,)), (1, (1, 2), (4, 6)))
        ),
        _case(
            "LayerNormalization",
            "of an older opset",
            "u = ms.Gelu(x)  y = LayerNormalization<axis=-1, epsilon=0.01>(u, g, b)",
            lambda o: _layer_norm(F.gelu(o["x"]), o["g"], o["b"], 0.01),
            opset=opset,
            **weights,
        ),
    )


def _embedding(inputs: str, opset: int, **given: Any) -> Case:
    """The table of words is the operand x."""

    def formula(o: Mapping[str, Tensor]) -> Tensor:
        total = (
            o["x"][torch.from_numpy(_IDS).long()] + o["places"][torch.from_numpy(given.get("at", np.arange(4))).long()]
        )
        if "parts" in o:
            total = total + o["parts"][torch.from_numpy(_KINDS).long()]
        return _layer_norm(total, o["g"], o["b"], 0.01)

    call = f"y, count = ms.EmbedLayerNormalization<epsilon=0.01>({inputs})"
    weights: dict[str, Any] = {"places": (5, 6), "g": (6,), "b": (6,), "ids": _IDS, "mask": _SEEN, **given}
    return _case("EmbedLayerNormalization", inputs, call, formula, (9, 6), opset, **weights)


_IDS = np.asarray([[1, 2, 2, 8], [0, 3, 5, 1]], np.int32)
_KINDS = np.asarray([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32)
_SEEN = np.asarray([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
CASES = [
    _case(
        "NhwcConv",
        "pads and strides",
        "ms.NhwcConv<strides=[2,1], pads=[1,0,1,0], kernel_shape=[3,3]>(x, w, b)",
        lambda o: F.conv2d(o["x"].movedim(-1, 1), o["w"], o["b"], (2, 1), (1, 0)).movedim(1, -1),
        (2, 5, 6, 4),
        w=(3, 4, 3, 3),
        b=(3,),
    ),
    _case("Gelu", "plain", "ms.Gelu(x)", lambda o: F.gelu(o["x"])),
    _case("BiasGelu", "plain", "ms.BiasGelu(x, b)", lambda o: F.gelu(o["x"] + o["b"]), b=(6,)),
    _case("FastGelu", "plain", "ms.FastGelu(x)", lambda o: F.gelu(o["x"], approximate="tanh")),
    _case("FastGelu", "bias", "ms.FastGelu(x, b)", lambda o: F.gelu(o["x"] + o["b"], approximate="tanh"), b=(6,)),
    _case("QuickGelu", "plain", "ms.QuickGelu(x)", lambda o: o["x"] * torch.sigmoid(1.702 * o["x"])),
    _case("QuickGelu", "SiLU", "ms.QuickGelu<alpha=1.0>(x)", lambda o: F.silu(o["x"])),
    *(_transposed_matmul(*flags) for flags in [(1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1)]),
    _case("TransposeMatMul", "B", "ms.TransposeMatMul<transB=1>(x, w)", lambda o: o["x"] @ o["w"].T, w=(5, 6)),
    _case(
        "FusedGemm",
        "tanh",
        'ms.FusedGemm<transB=1, alpha=0.5, activation="Tanh">(x, w, b)',
        lambda o: torch.tanh(0.5 * o["x"] @ o["w"].T + o["b"]),
        (4, 6),
        w=(5, 6),
        b=(5,),
    ),
    _case(
        "FusedGemm",
        "leaky",
        'ms.FusedGemm<activation="LeakyRelu", activation_alpha=0.2>(x, w)',
        lambda o: F.leaky_relu(o["x"] @ o["w"], 0.2),
        (4, 6),
        w=(6, 5),
    ),
    _case(
        "FusedConv",
        "bias and sum",
        'ms.FusedConv<activation="Relu", kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x, w, b, s)',
        lambda o: torch.relu(_conv(o, stride=2, padding=1) + o["s"]),
        (2, 4, 5, 5),
        w=(3, 4, 3, 3),
        b=(3,),
        s=(2, 3, 3, 3),
    ),
    *(
        _activated(
            "clipped",
            'activation="Clip", activation_params=[-0.5, 1.0]',
            lambda o: torch.clamp(_conv(o), -0.5, 1.0),
            opset,
        )
        for opset in (10, 14)
    ),
    _activated("leaky", 'activation="LeakyRelu", activation_params=[0.1]', lambda o: F.leaky_relu(_conv(o), 0.1)),
    _activated(
        "hard",
        'activation="HardSigmoid", activation_params=[0.3, 0.4], group=2',
        lambda o: torch.clamp(0.3 * _conv(o, groups=2) + 0.4, 0, 1),
        w=(4, 2, 3, 3),
    ),
    *(entry for opset in (11, 17, 21) for entry in _normalizations(opset)),
    _case(
        "Attention",
        "plain",
        "ms.Attention<num_heads=2>(x, w, b)",
        lambda o: _attended(_projected(o["x"], o)),
        opset=11,
        **_QKV,
    ),
    _case(
        "Attention",
        "causal and scaled",
        "ms.Attention<num_heads=3, unidirectional=1, scale=0.3>(x, w, b)",
        lambda o: _attended(_projected(o["x"], o), 3, _CAUSAL, 0.3),
        **_QKV,
    ),
    *(
        _case(
            "Attention",
            f"mask of rank {mask.ndim}",
            "ms.Attention<num_heads=2>(x, w, b, mask)",
            lambda o, low=low: _attended(_projected(o["x"], o), 2, low),  # type: ignore[misc]
            opset=opset,
            mask=mask,
            **_QKV,
        )
        for mask, low in ((_MASK, _LOW), (_LENGTHS, _BY_LENGTH))
        for opset in (11, 14)
    ),
    _case(
        "Attention",
        "sizes",
        "ms.Attention<num_heads=2, qkv_hidden_sizes=[6, 6, 4]>(x, w, b)",
        lambda o: _attended(_projected(o["x"], o, 6, 6, 4)),
        w=(6, 16),
        b=(16,),
    ),
    _case(
        "MultiHeadAttention",
        "bias and mask",
        "ms.MultiHeadAttention<num_heads=2>(x, k, v, b, mask)",
        lambda o: _attended(
            (part + b for part, b in zip((o["x"], o["k"], o["v"]), o["b"].chunk(3), strict=True)), 2, _LOW
        ),
        k=(2, 4, 6),
        v=(2, 4, 6),
        b=(18,),
        mask=_MASK,
    ),
    _case(
        "MultiHeadAttention",
        "attention bias",
        'ms.MultiHeadAttention<num_heads=2>(x, k, v, "", "", a)',
        lambda o: _attended((o["x"], o["k"], o["v"]), 2, o["a"]),
        k=(2, 4, 6),
        v=(2, 4, 6),
        a=(1, 2, 4, 4),
    ),
    _embedding("ids, kinds, x, places, parts, g, b, mask", 11, kinds=_KINDS, parts=(2, 6)),
    _embedding('ids, "", x, places, "", g, b, mask', 14),
    _embedding('ids, "", x, places, "", g, b, mask, at', 18, at=np.asarray([[0, 1, 2, 3], [4, 3, 1, 1]], np.int32)),
    _case(
        "Attention",
        "count of a mask",
        """e, count = ms.EmbedLayerNormalization(ids, "", words, places, "", g, h, mask)  z = Add(e, x)
        y = ms.Attention<num_heads=2>(z, w, b, count)""",
        lambda o: _attended(
            _projected(
                _layer_norm(o["words"][torch.from_numpy(_IDS).long()] + o["places"], o["g"], o["h"]) + o["x"], o
            ),
            2,
            _BY_LENGTH,
        ),
        words=(9, 6),
        places=(4, 6),
        g=(6,),
        h=(6,),
        ids=_IDS,
        mask=_SEEN,
        **_QKV,
    ),
]


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_contrib_operators_become_standard_ones(entry: Case):
    assert wrong(entry) == {}
    source = entry.model()
    model = read(source)
    assert model.opset == 18
    assert not any(node.domain for node in model.nodes)
    assert set(model.parameters) == set(entry.parameters)
    if entry.rule != "NhwcConv":
        # It has no CPU kernel.
        assert_same_output(source, model, entry.fed(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "nodes, message",
    [
        ('[f] y = ms.FusedConv<activation="Mish">(i, w)', "FusedConv 'f' .*: its activation is 'Mish'"),
        (
            "[f] y, m = ms.SkipLayerNormalization(x, x, g)  z = Exp(m)",
            "its output 'm' has no meaning outside of that operator",
        ),
        ("[f] y = ms.Attention<num_heads=2, do_rotary=1>(x, v, c)", "it rotates its queries and keys"),
        ('[f] y = ms.Attention<num_heads=2>(x, v, c, "", p)', "it has the optional input 4 \\('p'\\)"),
        ("[f] y = ms.MultiHeadAttention<num_heads=2>(x)", "query, key and value are not three tensors"),
        ("[f] y = ms.Attention<num_heads=2>(x, v, c, k)", "its mask 'k' has the shape \\[8\\]"),
    ],
)
def test_settings_without_a_standard_form_are_an_error(nodes: str, message: str):
    outputs = "y, float[a] z" if " z = " in nodes else "y"
    nodes = nodes.replace("ms.", "com.microsoft.")
    body = f"(float[2,4,6] x, float[2,4,5,5] i) => (float[a,b,c] {outputs}) {{ {nodes} }}"
    stored = {"w": normal(3, 4, 1, 1), "g": normal(6), "v": normal(6, 18), "c": normal(18)}
    stored |= {"p": normal(2, 2, 2, 4, 3), "k": np.zeros(8, np.int32)}
    source = model_of(body, opset=14, domains=_RUNTIME, **stored)
    with pytest.raises(UnsupportedOperatorError, match=message):
        read(source)


def test_the_error_names_all_other_operators_outside_of_onnx():
    body = """(float[2,4,6] x) => (float[a,b,c] y) {
        u = com.microsoft.GroupNorm(x, g, g)  v = com.microsoft.Inverse(u)
        y = com.microsoft.Inverse(v) }"""
    source = model_of(body, opset=14, domains=_RUNTIME, g=(6,))
    with pytest.raises(ShapeError, match=r"GroupNorm, an operator outside of ONNX \(as are 2 com.microsoft::Inverse\)"):
        read(source)


def test_masks_of_contrib_operators_do_not_train():
    body = """(float[2,4,6] x) => (float[2,4,6] y) {
        q = MatMul(x, w)  y = com.microsoft.MultiHeadAttention<num_heads=2>(q, x, x, "", "", a) }"""
    mask = np.triu(np.full((1, 1, 4, 4), -10000, np.float32), 1)
    source = model_of(body, opset=14, domains=_RUNTIME, w=(6, 6), a=mask)
    assert read(source).parameters == ("w",)


def test_an_addition_of_the_runtime_needs_no_import():
    body = "(float[2,4] x) => (float[N] y) { l = LayerNormalization<axis=-1>(x, s, b)  y = MatMul(l, w) }"
    found = read_model(model_of(body, opset=11, s=np.ones(4), b=np.zeros(4), w=(4, 3)))
    assert [node.op for node in found.nodes][:2] == ["LayerNormalization", "MatMul"]
