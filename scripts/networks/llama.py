"""Llama: a decoder of transformer blocks, decomposed as exporters decompose it; 69 nodes a block."""

import math
from dataclasses import dataclass

import numpy as np

from scripts.networks.builder import Builder


@dataclass(frozen=True, slots=True)
class Llama:
    """Sizes of a decoder; attention has `key_heads` heads of keys and values."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    tokens: int = 2048
    vocabulary: int = 128_256

    @property
    def head_width(self) -> int:
        return self.width // self.heads


LLAMA_8B = Llama(layers=32, width=4096, heads=32, key_heads=8, hidden=14336)
LLAMA_70B = Llama(layers=80, width=8192, heads=64, key_heads=8, hidden=28672)


def llama(net: Builder, x: str, sizes: Llama) -> str:
    """From token indices [1, tokens] to logits [1, tokens, vocabulary].

    Source: Touvron et al., Llama 2, 2023; sizes of Llama 3.
    """
    half = sizes.head_width // 2
    angles = np.outer(np.arange(sizes.tokens), 500_000.0 ** (-np.arange(half) / half))
    angles = np.concatenate([angles, angles], axis=1).astype(np.float32)
    net.constant("cos", np.cos(angles)[None, None])
    net.constant("sin", np.sin(angles)[None, None])
    net.constant("mask", np.triu(np.full((sizes.tokens, sizes.tokens), -1e9, np.float32), 1)[None, None])
    net.constant("scale", np.array(1 / math.sqrt(sizes.head_width), np.float32))
    net.constant("eps", np.array(1e-5, np.float32))
    net.constant("one", np.array(1, np.float32))
    net.constant("two", np.array(2, np.float32))
    for name, values in {"0": [0], "half": [half], "end": [2**62], "axis": [-1], "group": [2]}.items():
        net.constant(name, np.array(values, np.int64))
    x = net.add("Gather", [net.parameter("embed", (sizes.vocabulary, sizes.width), 0.01), x], "embedded")
    for index in range(sizes.layers):
        prefix = f"layers.{index}."
        attended = _attention(net, _normalized(net, x, f"{prefix}input_norm", sizes.width), f"{prefix}attn.", sizes)
        x = net.sum(x, attended, f"{prefix}add1")
        y = _normalized(net, x, f"{prefix}post_norm", sizes.width)
        gate = _product(net, y, f"{prefix}mlp.gate", sizes.width, sizes.hidden)
        gate = net.add("Mul", [gate, net.add("Sigmoid", [gate], f"{prefix}mlp.sigmoid")], f"{prefix}mlp.silu")
        up = net.add("Mul", [gate, _product(net, y, f"{prefix}mlp.up", sizes.width, sizes.hidden)], f"{prefix}mlp.mul")
        x = net.sum(x, _product(net, up, f"{prefix}mlp.down", sizes.hidden, sizes.width), f"{prefix}add2")
    return _product(net, _normalized(net, x, "norm", sizes.width), "lm_head", sizes.width, sizes.vocabulary)


def _product(net: Builder, x: str, name: str, width_in: int, width_out: int) -> str:
    return net.add("MatMul", [x, net.parameter(f"{name}.weight", (width_in, width_out), 1 / width_in)], name)


def _normalized(net: Builder, x: str, name: str, width: int) -> str:
    mean = net.add("ReduceMean", [net.add("Pow", [x, "two"], f"{name}.square")], f"{name}.mean", axes=[-1])
    root = net.add("Sqrt", [net.add("Add", [mean, "eps"], f"{name}.eps")], f"{name}.root")
    scaled = net.add("Mul", [x, net.add("Div", ["one", root], f"{name}.inverse")], f"{name}.scaled")
    return net.add("Mul", [scaled, net.parameter(f"{name}.weight", (width,), 1.0)], name)


def _attention(net: Builder, x: str, prefix: str, sizes: Llama) -> str:
    def split(part: str, heads: int) -> str:
        shape = net.constant(f"heads{heads}", np.array([1, sizes.tokens, heads, sizes.head_width], np.int64))
        y = _product(net, x, f"{prefix}{part}", sizes.width, heads * sizes.head_width)
        y = net.add("Reshape", [y, shape], f"{prefix}{part}.heads")
        return net.add("Transpose", [y], f"{prefix}{part}.transposed", perm=[0, 2, 1, 3])

    def rotated(y: str) -> str:
        first = net.add("Slice", [y, "0", "half", "axis"], f"{y}.first")
        second = net.add("Neg", [net.add("Slice", [y, "half", "end", "axis"], f"{y}.second")], f"{y}.negated")
        swapped = net.add("Concat", [second, first], f"{y}.swapped", axis=-1)
        parts = net.add("Mul", [y, "cos"], f"{y}.cos"), net.add("Mul", [swapped, "sin"], f"{y}.sin")
        return net.add("Add", parts, f"{y}.rotated")

    def repeated(y: str) -> str:
        groups = sizes.heads // sizes.key_heads
        wide = (1, sizes.key_heads, groups, sizes.tokens, sizes.head_width)
        flat = (1, sizes.heads, sizes.tokens, sizes.head_width)
        y = net.add("Unsqueeze", [y, "group"], f"{y}.grouped")
        y = net.add("Expand", [y, net.constant("wide", np.array(wide, np.int64))], f"{y}.wide")
        return net.add("Reshape", [y, net.constant("flat", np.array(flat, np.int64))], f"{y}.flat")

    query, key = rotated(split("q", sizes.heads)), repeated(rotated(split("k", sizes.key_heads)))
    value = repeated(split("v", sizes.key_heads))
    scores = net.add("MatMul", [query, net.add("Transpose", [key], f"{key}.t", perm=[0, 1, 3, 2])], f"{prefix}scores")
    scores = net.add("Add", [net.add("Mul", [scores, "scale"], f"{prefix}scaled"), "mask"], f"{prefix}masked")
    mixed = net.add("MatMul", [net.add("Softmax", [scores], f"{prefix}softmax", axis=-1), value], f"{prefix}mixed")
    mixed = net.add("Transpose", [mixed], f"{prefix}back", perm=[0, 2, 1, 3])
    shape = net.constant("joined", np.array([1, sizes.tokens, sizes.width], np.int64))
    joined = net.add("Reshape", [mixed, shape], f"{prefix}joined")
    return _product(net, joined, f"{prefix}o", sizes.width, sizes.width)
