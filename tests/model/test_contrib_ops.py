import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from onnxgc.api import optimize
from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.core.ir import Array
from onnxgc.model.read import read_model
from tests.model.model_helpers import model_of, normal, run, run_read, text_model, with_weights

_RUNTIME = ', "com.microsoft": 1'
Formula = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class ContribCase:
    """Nodes that compute y from the input x and weights; `formula` is y in torch."""

    name: str
    nodes: str
    shape: tuple[int, ...]
    weights: Mapping[str, tuple[int, ...]]
    formula: Formula
    constants: Mapping[str, Array] = field(default_factory=dict)
    opset: int = 14

    def __str__(self) -> str:
        return f"{self.name}, opset {self.opset}"

    def values(self) -> dict[str, Array]:
        drawn = {name: normal(*shape, seed=ord(name[0])) for name, shape in self.weights.items()}
        return {name: value * np.float32(0.5) for name, value in drawn.items()}

    def model(self) -> onnx.ModelProto:
        sizes = ",".join(map(str, self.shape))
        nodes = self.nodes.replace("ms.", "com.microsoft.")
        body = f"(float[{sizes}] x) => (float[a,b,c] y) {{ {nodes} }}"
        source = text_model(body, opset=self.opset, domains=_RUNTIME)
        return with_weights(source, **self.values(), **self.constants)


def _layer_norm(x: Tensor, g: Tensor, b: Tensor | None = None, epsilon: float = 1e-12) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], g, b, epsilon)


def _rms(x: Tensor, g: Tensor, epsilon: float, axes: int | tuple[int, ...] = -1) -> Tensor:
    return x / torch.sqrt((x * x).mean(axes, keepdim=True) + epsilon) * g


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _attention_formula(
    operands: Iterable[Tensor], heads: int, bias: Tensor | float = 0.0, scale: float = 0.0
) -> Tensor:
    q, k, v = (_heads(part, heads) for part in operands)
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1])) + bias
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _qkv(o: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return (o["x"] @ o["w"] + o["b"]).chunk(3, -1)


_SEQUENCE = (2, 4, 6)
_MASK = np.asarray([[1, 1, 0, 1], [1, 0, 0, 1]], np.int32)
_CAUSAL = torch.triu(torch.full((4, 4), -10000.0), 1)
_LOW = torch.from_numpy((1.0 - _MASK) * -10000.0)[:, None, None, :]
_LENGTHS = np.asarray([3, 2], np.int32)
_BY_LENGTH = torch.where(torch.arange(4) < torch.tensor([[3], [2]]), 0.0, -10000.0)[:, None, None, :]
_MHA = "q = MatMul(x, w)  k = MatMul(x, k_w)  v = MatMul(x, v_w)  y = ms.MultiHeadAttention"
_MHA_WEIGHTS = {"w": (6, 6), "k_w": (6, 6), "v_w": (6, 6)}


def _three(o: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return o["x"] @ o["w"], o["x"] @ o["k_w"], o["x"] @ o["v_w"]


def _conv(o: Mapping[str, Tensor], **settings: int) -> Tensor:
    return F.conv2d(o["x"], o["w"], o.get("b"), **settings)


def _transposed_matmul(trans_a: int, batch_a: int, trans_b: int, batch_b: int) -> ContribCase:
    """x: [2, 4, 6], and w in the shape for which x' w' is defined; ' transposes as the flags say."""

    def transposed(t: Tensor, is_transposed: int, moves_batch: int) -> Tensor:
        t = t.movedim(0, -2) if moves_batch else t
        return t.transpose(-1, -2) if is_transposed else t

    left = transposed(torch.zeros(2, 4, 6), trans_a, batch_a).shape
    inner = (left[0], left[-1], 5)
    shape = transposed(torch.zeros(inner), trans_b, 0).shape
    shape = torch.zeros(shape).movedim(-2, 0).shape if batch_b else shape
    attributes = f"alpha=0.5, transA={trans_a}, transBatchA={batch_a}, transB={trans_b}, transBatchB={batch_b}"
    return ContribCase(
        f"FusedMatMul {trans_a}{batch_a}{trans_b}{batch_b}",
        f"y = ms.FusedMatMul<{attributes}>(x, w)",
        (2, 4, 6),
        {"w": tuple(shape)},
        lambda o: 0.5 * transposed(o["x"], trans_a, batch_a) @ transposed(o["w"], trans_b, batch_b),
    )


def _behind_product(
    name: str, call: str, formula: Callable[[Mapping[str, Tensor], Tensor], Tensor], **more: Any
) -> ContribCase:
    """Nodes that read u = x w, with further weights of 6 elements named in the call."""
    opset = more.pop("opset", 14)
    weights = {"w": (6, 6), **{key: (6,) for key in "gbc" if re.search(rf"\b{key}\b", call)}, **more}
    nodes = f"u = MatMul(x, w)  {call}"
    return ContribCase(name, nodes, _SEQUENCE, weights, lambda o: formula(o, o["x"] @ o["w"]), opset=opset)


def _convolved(
    name: str, settings: str, formula: Formula, opset: int = 14, w: tuple[int, ...] = (3, 4, 3, 3)
) -> ContribCase:
    return ContribCase(name, f"y = ms.FusedConv<{settings}>(x, w)", (2, 4, 5, 5), {"w": w}, formula, opset=opset)


def _attended(name: str, settings: str, formula: Formula, opset: int = 14, **constants: Array) -> ContribCase:
    inputs = ", ".join(["x", "w", "b", *constants])
    weights = {"w": (6, 18), "b": (18,)}
    return ContribCase(name, f"y = ms.Attention<{settings}>({inputs})", _SEQUENCE, weights, formula, constants, opset)


def _normalizations(opset: int) -> Iterable[ContribCase]:
    return (
        _behind_product(
            "SkipLayerNormalization",
            "y = ms.SkipLayerNormalization<epsilon=0.01>(u, x, g, b)",
            lambda o, u: _layer_norm(o["x"] + u, o["g"], o["b"], 0.01),
            opset=opset,
        ),
        _behind_product(
            "SkipLayerNormalization with bias and sum",
            'z, "", "", t = ms.SkipLayerNormalization(u, x, g, b, c)  y = Mul(z, t)',
            lambda o, u: (total := o["x"] + u + o["c"]) * _layer_norm(total, o["g"], o["b"]),
            opset=opset,
        ),
        _behind_product(
            "SkipSimplifiedLayerNormalization",
            "y = ms.SkipSimplifiedLayerNormalization<epsilon=0.1>(u, x, g, b)",
            lambda o, u: _rms(o["x"] + u + o["b"], o["g"], 0.1),
            opset=opset,
        ),
        _behind_product(
            "SimplifiedLayerNormalization",
            "y = SimplifiedLayerNormalization<axis=-1, epsilon=0.1>(u, g)",
            lambda o, u: _rms(u, o["g"], 0.1),
            opset=opset,
        ),
        _behind_product(
            "SimplifiedLayerNormalization of two axes",
            "y = SimplifiedLayerNormalization<axis=1, epsilon=0.1>(u, g)",
            lambda o, u: _rms(u, o["g"], 0.1, (1, 2)),
            g=(4, 6),
            opset=opset,
        ),
        _behind_product(
            "LayerNormalization",
            "y = LayerNormalization<axis=-1, epsilon=0.01>(u, g, b)",
            lambda o, u: _layer_norm(u, o["g"], o["b"], 0.01),
            opset=opset,
        ),
    )


CASES = [
    ContribCase(
        "NhwcConv",
        "y = ms.NhwcConv<strides=[2,1], pads=[1,0,1,0], kernel_shape=[3,3]>(x, w, b)",
        (2, 5, 6, 4),
        {"w": (3, 4, 3, 3), "b": (3,)},
        lambda o: F.conv2d(o["x"].movedim(-1, 1), o["w"], o["b"], (2, 1), (1, 0)).movedim(1, -1),
    ),
    _behind_product("Gelu", "y = ms.Gelu(u)", lambda o, u: F.gelu(u)),
    _behind_product("BiasGelu", "y = ms.BiasGelu(u, b)", lambda o, u: F.gelu(u + o["b"])),
    _behind_product("FastGelu with bias", "y = ms.FastGelu(u, b)", lambda o, u: F.gelu(u + o["b"], approximate="tanh")),
    _behind_product("QuickGelu", "y = ms.QuickGelu(u)", lambda o, u: u * torch.sigmoid(1.702 * u)),
    *(_transposed_matmul(*flags) for flags in [(1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1)]),
    ContribCase(
        "FusedGemm",
        'y = ms.FusedGemm<transB=1, alpha=0.5, activation="Tanh">(x, w, b)',
        (4, 6),
        {"w": (5, 6), "b": (5,)},
        lambda o: torch.tanh(0.5 * o["x"] @ o["w"].T + o["b"]),
    ),
    ContribCase(
        "FusedGemm leaky",
        'y = ms.FusedGemm<activation="LeakyRelu", activation_alpha=0.2>(x, w)',
        (4, 6),
        {"w": (6, 5)},
        lambda o: F.leaky_relu(o["x"] @ o["w"], 0.2),
    ),
    ContribCase(
        "FusedConv with bias and sum",
        """u = Conv<strides=[2,2]>(x, v)
        y = ms.FusedConv<activation="Relu", kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x, w, b, u)""",
        (2, 4, 5, 5),
        {"w": (3, 4, 3, 3), "b": (3,), "v": (3, 4, 1, 1)},
        lambda o: torch.relu(_conv(o, stride=2, padding=1) + F.conv2d(o["x"], o["v"], stride=2)),
    ),
    *(
        _convolved(
            "FusedConv clipped",
            'activation="Clip", activation_params=[-0.5, 1.0]',
            lambda o: torch.clamp(_conv(o), -0.5, 1.0),
            opset,
        )
        for opset in (10, 14)
    ),
    _convolved(
        "FusedConv hard",
        'activation="HardSigmoid", activation_params=[0.3, 0.4], group=2',
        lambda o: torch.clamp(0.3 * _conv(o, groups=2) + 0.4, 0, 1),
        w=(4, 2, 3, 3),
    ),
    *(entry for opset in (11, 17, 21) for entry in _normalizations(opset)),
    _attended("Attention", "num_heads=2", lambda o: _attention_formula(_qkv(o), 2), 11),
    _attended(
        "Attention, causal and scaled",
        "num_heads=3, unidirectional=1, scale=0.3",
        lambda o: _attention_formula(_qkv(o), 3, _CAUSAL, 0.3),
    ),
    *(
        _attended(
            f"Attention, mask of rank {mask.ndim}",
            "num_heads=2",
            lambda o, low=low: _attention_formula(_qkv(o), 2, low),  # type: ignore[misc]
            opset,
            mask=mask,
        )
        for mask, low in ((_MASK, _LOW), (_LENGTHS, _BY_LENGTH))
        for opset in (11, 14)
    ),
    ContribCase(
        "Attention, sizes",
        "y = ms.Attention<num_heads=2, qkv_hidden_sizes=[6, 6, 4]>(x, w, b)",
        _SEQUENCE,
        {"w": (6, 16), "b": (16,)},
        lambda o: _attention_formula((o["x"] @ o["w"] + o["b"]).split([6, 6, 4], -1), 2),
    ),
    ContribCase(
        "MultiHeadAttention, bias and mask",
        _MHA + "<num_heads=2>(q, k, v, b, mask)",
        _SEQUENCE,
        {**_MHA_WEIGHTS, "b": (18,)},
        lambda o: _attention_formula((part + b for part, b in zip(_three(o), o["b"].chunk(3), strict=True)), 2, _LOW),
        {"mask": _MASK},
    ),
    ContribCase(
        "MultiHeadAttention, attention bias",
        _MHA + '<num_heads=2>(q, k, v, "", "", a)',
        _SEQUENCE,
        {**_MHA_WEIGHTS, "a": (1, 2, 4, 4)},
        lambda o: _attention_formula(_three(o), 2, o["a"]),
    ),
]


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_contrib_operators_become_standard_ones(entry: ContribCase) -> None:
    source, x = entry.model(), normal(*entry.shape)
    model = read_model(source, loss="mse")
    assert model.opset == 18
    assert not any(node.domain for node in model.nodes)
    assert set(model.parameters) == set(entry.weights)
    values = {name: torch.from_numpy(value).double().requires_grad_() for name, value in entry.values().items()}
    y = entry.formula({"x": torch.from_numpy(x).double(), **values})
    target = np.zeros(tuple(y.shape), np.float32)
    (found,) = run_read(model, {"x": x, "target": target}, "y")
    np.testing.assert_allclose(found, y.detach(), rtol=1e-4, atol=1e-5)
    if not entry.name.startswith("NhwcConv"):
        # It has no CPU kernel.
        (expected,) = run(source, {"x": x})
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    graph = optimize(source, loss="mse", check=False).training_graph
    gradients = run(graph.model, {"x": x, "target": target}, *graph.gradient_of.values())
    truth = torch.autograd.grad(y.square().mean(), [values[name] for name in graph.gradient_of])
    for name, gradient, expected_gradient in zip(graph.gradient_of, gradients, truth, strict=True):
        scale = float(expected_gradient.abs().max())
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


_FEEDS = {
    "ids": np.asarray([[1, 2, 2, 8], [0, 3, 5, 1]], np.int32),
    "mask": np.asarray([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32),
}
_EMBEDDED = """(int32[2,4] ids, int32[2,4] kinds, int32[2,4] mask) => (float[2,4,6] y, int32[2] count) {
    y, count = com.microsoft.EmbedLayerNormalization<epsilon=0.01>(INPUTS) }"""


@pytest.mark.parametrize(
    "inputs, has_kinds, opset",
    [
        ("ids, kinds, words, places, parts, g, b, mask", True, 11),
        ('ids, "", words, places, "", g, b, mask', False, 14),
        ('ids, "", words, places, "", g, b, mask, at', False, 18),
    ],
)
def test_embeddings(inputs: str, has_kinds: bool, opset: int) -> None:
    body = _EMBEDDED.replace("INPUTS", inputs)
    shapes = {"words": (9, 6), "places": (5, 6), "g": (6,), "b": (6,), **({"parts": (2, 6)} if has_kinds else {})}
    weights = {name: normal(*shape, seed=ord(name[0])) for name, shape in shapes.items()}
    at = np.asarray([[0, 1, 2, 3], [4, 3, 1, 1]], np.int32)
    stored = {**weights, **({"at": at} if "at" in inputs.split(", ") else {})}
    source = with_weights(text_model(body, opset=opset, domains=_RUNTIME), **stored)
    feeds = {**_FEEDS, "kinds": np.asarray([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32)}
    expected = run(source, feeds, "y")[0]
    model = read_model(source, loss="mse")
    assert set(model.parameters) == set(weights)
    used = {name: feeds[name] for name in model.inputs}
    (found,) = run_read(model, {**used, "target": np.zeros_like(expected)}, "y")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    graph = optimize(source, loss="mse", check=False).training_graph
    gradients = run(graph.model, {**used, "target": np.zeros_like(expected)}, *graph.gradient_of.values())
    values = {name: torch.from_numpy(value).double().requires_grad_() for name, value in weights.items()}
    places = at if "at" in stored else np.arange(4)
    total = values["words"][torch.from_numpy(feeds["ids"]).long()] + values["places"][torch.from_numpy(places).long()]
    if has_kinds:
        total = total + values["parts"][torch.from_numpy(feeds["kinds"]).long()]
    loss = _layer_norm(total, values["g"], values["b"], 0.01).square().mean()
    truth = torch.autograd.grad(loss, [values[name] for name in graph.gradient_of])
    for name, gradient, wanted in zip(graph.gradient_of, gradients, truth, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()), err_msg=name)


def test_attention_reads_the_count_of_a_mask() -> None:
    body = """(int32[2,4] ids, int32[2,4] mask) => (float[2,4,6] y) {
        e, count = com.microsoft.EmbedLayerNormalization(ids, "", words, places, "", g, b, mask)
        y = com.microsoft.Attention<num_heads=2>(e, w, c, count) }"""
    shapes = {"words": (9, 6), "places": (5, 6), "g": (6,), "b": (6,), "w": (6, 18), "c": (18,)}
    weights = {name: normal(*shape) for name, shape in shapes.items()}
    source = with_weights(text_model(body, opset=14, domains=_RUNTIME), **weights)
    (expected,) = run(source, _FEEDS)
    (found,) = run_read(read_model(source, loss="mse"), {**_FEEDS, "target": np.zeros_like(expected)}, "y")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


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
def test_settings_without_a_standard_form_are_an_error(nodes: str, message: str) -> None:
    outputs = "y, float[a] z" if " z = " in nodes else "y"
    nodes = nodes.replace("ms.", "com.microsoft.")
    body = f"(float[2,4,6] x, float[2,4,5,5] i) => (float[a,b,c] {outputs}) {{ {nodes} }}"
    stored = {"w": normal(3, 4, 1, 1), "g": normal(6), "v": normal(6, 18), "c": normal(18)}
    stored |= {"p": normal(2, 2, 2, 4, 3), "k": np.zeros(8, np.int32)}
    source = with_weights(text_model(body, opset=14, domains=_RUNTIME), **stored)
    with pytest.raises(UnsupportedOperatorError, match=message):
        read_model(source, loss="mse")


def test_the_error_names_all_other_operators_outside_of_onnx() -> None:
    body = """(float[2,4,6] x) => (float[a,b,c] y) {
        u = com.microsoft.GroupNorm(x, g, g)  v = com.microsoft.Inverse(u)
        y = com.microsoft.Inverse(v) }"""
    source = model_of(body, opset=14, domains=_RUNTIME, g=(6,))
    with pytest.raises(ShapeError, match=r"GroupNorm, an operator outside of ONNX \(as are 2 com.microsoft::Inverse\)"):
        read_model(source, loss="mse")


def test_masks_of_contrib_operators_do_not_train() -> None:
    nodes = _MHA + '<num_heads=2>(q, k, v, "", "", a)'
    body = f"(float[2,4,6] x) => (float[2,4,6] y) {{ {nodes.replace('ms.', 'com.microsoft.')} }}"
    weights = {name: normal(*shape) for name, shape in _MHA_WEIGHTS.items()}
    mask = np.triu(np.full((1, 1, 4, 4), -10000, np.float32), 1)
    source = with_weights(text_model(body, opset=14, domains=_RUNTIME), **weights, a=mask)
    assert set(read_model(source, loss="mse").parameters) == set(weights)
