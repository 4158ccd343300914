from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from tests.gradients.gradient_case import Case, Formula, call, case, normal


def _conv(name: str, x: tuple[int, ...], w: tuple[int, ...], attributes: str = "", has_bias: bool = True) -> Case:
    bias = {"b": normal(w[0])} if has_bias else {}
    return call("Conv", name, attributes, x=x, w=w, **bias)


CONVOLUTION_CASES = (
    # by offset, the general form
    _conv("3x3", (2, 3, 6, 5), (4, 3, 3, 3)),
    _conv("without bias", (2, 3, 6, 5), (4, 3, 3, 3), has_bias=False),
    _conv(
        "pads larger than the kernel, stride 3",
        (2, 3, 4, 5),
        (4, 3, 2, 2),
        "kernel_shape=[2,2], pads=[3,4,5,3], strides=[3,3]",
    ),
    _conv("stride 2 unused pads and rows", (2, 3, 8, 8), (4, 3, 3, 3), "strides=[2,3], pads=[1,0,2,1]"),
    _conv("stride much larger than the kernel", (2, 5, 12, 12), (4, 5, 2, 1), "strides=[5,7], pads=[1,0,0,1]"),
    _conv("dilation and stride", (2, 3, 11, 12), (4, 3, 3, 3), "dilations=[2,3], strides=[3,2], pads=[2,1,0,3]"),
    _conv("auto_pad SAME_UPPER, stride 2", (2, 3, 6, 7), (4, 3, 3, 3), 'auto_pad="SAME_UPPER", strides=[2,2]'),
    _conv("auto_pad SAME_LOWER, stride 2", (2, 3, 6, 7), (4, 3, 3, 3), 'auto_pad="SAME_LOWER", strides=[2,2]'),
    _conv(
        "auto_pad SAME_UPPER, stride 3 of kernel 2", (2, 3, 7, 8), (4, 3, 2, 2), 'auto_pad="SAME_UPPER", strides=[3,3]'
    ),
    _conv("auto_pad VALID", (2, 3, 6, 7), (4, 3, 3, 2), 'auto_pad="VALID", strides=[2,2]'),
    _conv("1D", (2, 3, 9), (4, 3, 3), "pads=[1,2], strides=[2], dilations=[2]"),
    _conv("3D", (2, 3, 5, 4, 6), (4, 3, 2, 3, 2), "strides=[2,1,2], pads=[1,1,0,0,1,1], dilations=[1,1,2]"),
    # grouped
    _conv("two groups", (2, 4, 6, 5), (6, 2, 3, 3), "group=2, pads=[1,1,1,1]"),
    _conv(
        "groups, stride, dilation",
        (2, 6, 9, 8),
        (6, 2, 3, 2),
        "group=3, strides=[2,3], dilations=[2,1], pads=[0,1,2,1]",
    ),
    _conv("groups of 1x1", (2, 4, 5, 6), (6, 2, 1, 1), "group=2, strides=[2,2]"),
    # depthwise
    _conv("depthwise", (2, 4, 6, 5), (4, 1, 3, 3), "group=4, pads=[1,1,1,1]"),
    _conv("depthwise, stride 2 of odd size", (2, 4, 7, 8), (4, 1, 3, 3), "group=4, strides=[2,2], pads=[1,1,1,1]"),
    _conv("depthwise, dilation", (2, 4, 8, 8), (4, 1, 3, 3), "group=4, dilations=[2,2], pads=[2,1,0,3]"),
    _conv("depthwise, multiplier 3", (2, 4, 6, 5), (12, 1, 3, 3), "group=4, pads=[1,1,1,1], strides=[2,1]"),
    replace(
        _conv("depthwise in parts of the batch", (4, 8, 180, 184), (8, 1, 3, 3), "group=8, pads=[1,1,1,1]"),
        tolerance=1e-4,
    ),
    # pointwise: one Gemm, or a batched product from either side
    _conv("1x1 by Gemm", (2, 5, 2, 2), (6, 5, 1, 1)),
    _conv("1x1 by Gemm, stride 2 of odd size", (2, 7, 5, 3), (8, 7, 1, 1), "strides=[2,2]"),
    _conv("1x1 by product, fewer inputs", (2, 3, 8, 8), (5, 3, 1, 1)),
    _conv("1x1 by product, more inputs", (2, 5, 8, 8), (3, 5, 1, 1)),
    _conv("1x1 on one position", (3, 4, 1, 1), (5, 4, 1, 1)),
    _conv("1x1 with pads", (2, 3, 4, 5), (4, 3, 1, 1), "pads=[1,0,2,1]"),
    _conv("3D of kernel 1", (2, 3, 4, 4, 4), (4, 3, 1, 1, 1), "strides=[2,1,3]"),
    # stem: exchanged
    _conv("stem 7x7 stride 2 pad 3", (2, 3, 16, 15), (4, 3, 7, 7), "strides=[2,2], pads=[3,3,3,3]"),
    _conv("stem that leaves rows unused", (1, 3, 18, 16), (4, 3, 5, 5), "strides=[3,4]"),
    _conv("stem with unused end padding", (2, 1, 12, 12), (4, 1, 5, 5), "strides=[3,3], pads=[1,1,3,2]"),
    _conv("stem 5x5 stride 3 pad 1 on 32", (1, 3, 32, 32), (4, 3, 5, 5), "strides=[3,3], pads=[1,1,1,1]"),
    _conv("stem, dilation", (2, 2, 14, 15), (3, 2, 5, 5), "dilations=[2,3], strides=[2,1], pads=[1,2,0,1]"),
)


def _transposed_formula(begin: Sequence[int], end: Sequence[int], *, strides: int) -> Formula:
    """ConvTranspose with the pads that follow from auto_pad or output_shape; negative ones add zeros."""

    def formula(o: Mapping[str, Tensor]) -> Tensor:
        y = F.conv_transpose2d(o["x"], o["w"], stride=strides)
        return F.pad(y, [-begin[1], -end[1], -begin[0], -end[0]]) + o["b"].reshape(1, -1, 1, 1)

    return formula


def _transposed(name: str, x: tuple[int, ...], w: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    operands = {"x": normal(*x), "w": normal(*w)}
    if settings.pop("bias", True):
        operands["b"] = normal(w[1] * settings.pop("groups", 1))
    return call("ConvTranspose", name, attributes, **operands, **settings)


TRANSPOSED_CASES = (
    _transposed("2x2 stride 2", (2, 3, 4, 5), (3, 4, 2, 2), "strides=[2,2]"),
    _transposed("without bias", (2, 3, 4, 5), (3, 4, 2, 2), "strides=[2,2]", bias=False),
    _transposed("output padding", (2, 3, 3, 4), (3, 2, 3, 3), "strides=[2,3], pads=[1,1,1,1], output_padding=[1,2]"),
    _transposed("dilation and stride", (2, 3, 4, 5), (3, 2, 3, 2), "dilations=[2,3], strides=[3,2]"),
    _transposed("one position", (3, 4, 1, 1), (4, 5, 4, 4)),
    _transposed("1D in groups", (2, 4, 6), (4, 2, 3), "strides=[2], group=2", groups=2),
    _transposed("1x1 stride 2", (2, 3, 4, 5), (3, 4, 1, 1), "strides=[2,2], output_padding=[1,0]"),
    _transposed("large kernel onto few channels", (2, 4, 6, 7), (4, 3, 5, 5), "strides=[2,2], pads=[2,2,2,2]"),
    _transposed("two groups", (2, 4, 4, 5), (4, 3, 3, 3), "group=2, strides=[2,2], pads=[1,1,1,1]", groups=2),
    _transposed("depthwise, multiplier 2", (2, 4, 4, 5), (4, 2, 3, 3), "group=4, strides=[2,1]", groups=4),
    _transposed("1D", (2, 3, 6), (3, 4, 3), "strides=[2], pads=[1,0], output_padding=[1]"),
    _transposed(
        "3D",
        (1, 3, 3, 2, 3),
        (3, 2, 2, 3, 2),
        "strides=[2,1,2], pads=[1,0,0,0,1,0], dilations=[1,2,1], output_padding=[1,0,1]",
    ),
    *(
        _transposed(
            attributes, (2, 3, 4, 5), (3, 4, k, k), attributes, formula=_transposed_formula(begin, end, strides=strides)
        )
        for attributes, k, begin, end, strides in (
            ('auto_pad="VALID", strides=[2,2]', 3, (0, 0), (0, 0), 2),
            ('auto_pad="SAME_UPPER", strides=[2,2]', 3, (0, 0), (1, 1), 2),
            ('auto_pad="SAME_LOWER", strides=[2,2]', 3, (1, 1), (0, 0), 2),
            ('auto_pad="SAME_UPPER", strides=[3,3]', 2, (0, 0), (0, 0), 3),
            ("output_shape=[8,8], strides=[2,2], pads=[1,1,1,1]", 3, (1, 2), (0, 1), 2),
            ("output_shape=[10,12], strides=[2,2]", 3, (0, 0), (-1, -1), 2),
            ('output_shape=[8,9], strides=[2,2], auto_pad="SAME_UPPER", output_padding=[1,1]', 3, (1, 1), (0, 1), 2),
        )
    ),
)


def _gemm(name: str, attributes: str, *shapes: tuple[int, ...]) -> Case:
    operands = {key: normal(*shape) for key, shape in zip("abc", shapes, strict=False)}
    return call("Gemm", name, attributes, **operands)


def _matmul(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> Case:
    return call("MatMul", name, a=a, b=b)


def _einsum(name: str, equation: str, *shapes: tuple[int, ...], as_torch: str = "", **settings: Any) -> Case:
    """The equation; a scalar result is multiplied by a constant, since an output needs at least one axis."""
    operands = {f"a{index}": normal(*shape) for index, shape in enumerate(shapes)}
    names = tuple(operands)
    body = f'y = Einsum<equation="{equation}">({", ".join(operands)})'
    if settings.pop("is_scalar", False):
        body = body.replace("y =", "s =") + " y = Mul(s, w)"
        operands |= {"w": normal(3)}
        settings["frozen"] = ("w",)

    def formula(o: Mapping[str, Tensor]) -> Tensor:
        y = torch.einsum(as_torch or equation, *(o[name] for name in names))
        return y * o["w"] if "w" in o else y

    return case("Einsum", name, body, **operands, formula=formula, **settings)


EINSUM_CASES = (
    _einsum("matrix product", "ij,jk->ik", (3, 4), (4, 5)),
    _einsum("implicit output", "ij,jk", (3, 4), (4, 5)),
    _einsum("implicit output in alphabetical order", "ba", (3, 4)),
    _einsum("implicit output with an ellipsis", "...ij,...jk", (2, 3, 4), (2, 4, 5)),
    _einsum("spaces", " i j , j k -> i k ", (3, 4), (4, 5), as_torch="ij,jk->ik"),
    _einsum("heads last", "bihd,bjhd->bhij", (2, 4, 3, 5), (2, 6, 3, 5)),
    _einsum("batch in another place", "ibj,bjk->kib", (3, 2, 4), (2, 4, 5)),
    _einsum("outer product", "i,j->ij", (3,), (4,)),
    _einsum("scaled columns, transposed", "ij,j->ji", (3, 4), (4,)),
    _einsum("inner product", "i,i->", (4,), (4,), is_scalar=True),
    _einsum("sum", "ij->", (3, 4), is_scalar=True),
    _einsum("transposition", "ijk->kij", (2, 3, 4)),
    _einsum("labels of both operands summed", "aij,jkb->ik", (2, 3, 4), (4, 5, 2)),
    _einsum("trace", "ii->", (3, 3), is_scalar=True),
    _einsum("diagonal around an axis", "ibi->bi", (3, 2, 3)),
    _einsum("diagonal beside a matrix", "ii,ij->j", (3, 3), (3, 4)),
    _einsum("three operands", "ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
    _einsum("three operands of one label", "i,i,i->i", (4,), (4,), (4,)),
    _einsum("four operands", "ab,bc,cd,de->ae", (2, 3), (3, 2), (2, 4), (4, 3)),
    _einsum("ellipsis that broadcasts", "...ij,...jk->...ik", (2, 1, 3, 4), (1, 5, 4, 2)),
    _einsum("ellipsis of nothing", "...ij,...jk->...ik", (3, 4), (4, 5)),
    _einsum("ellipsis moved", "...i->i...", (2, 3, 4)),
    case(
        "Einsum",
        "an operand with itself",
        'y = Einsum<equation="ij,kj->ik">(a, a)',
        a=(3, 4),
        formula=lambda o: o["a"] @ o["a"].T,
    ),
)


PRODUCT_CASES = (
    _gemm("plain", "", (3, 4), (4, 5)),
    _gemm("plain, scaled", "alpha=0.5, beta=-2.0", (3, 4), (4, 5), (5,)),
    _gemm("A transposed, scaled", "transA=1, alpha=0.5, beta=3.0", (4, 3), (4, 5), (3, 1)),
    _gemm("B transposed, scaled", "transB=1, alpha=-1.5, beta=0.5", (3, 4), (5, 4), (1, 5)),
    _gemm("both transposed, scaled", "transA=1, transB=1, alpha=2.0, beta=0.25", (4, 3), (5, 4), (3, 5)),
    _gemm("C a scalar", "", (3, 4), (4, 5), ()),
    _gemm("one column", "", (3, 4), (4, 1), (1,)),
    case("Gemm", "A times its own transpose", "y = Gemm<transB=1, alpha=0.5>(a, a)", a=(3, 4)),
    _matmul("2D x 2D", (3, 4), (4, 5)),
    case("MatMul", "1D x 1D", "s = MatMul(a, b) y = Mul(s, spread)", a=(4,), b=(4,), spread=(2,)),
    _matmul("2D x 1D", (3, 4), (4,)),
    _matmul("1D x 3D", (4,), (2, 4, 5)),
    _matmul("3D x 2D", (2, 3, 4), (4, 5)),
    _matmul("batches alike", (2, 3, 4), (2, 4, 5)),
    _matmul("batch broadcast on both sides", (2, 1, 3, 4), (1, 5, 4, 2)),
    _matmul("batch ranks differ, left broadcast", (1, 2, 4), (2, 3, 4, 5)),
    _matmul("rows, columns and inner of one", (2, 1, 1), (2, 1, 1)),
    case("MatMul", "a times itself", "y = MatMul(a, a)", a=(2, 3, 3)),
    case(
        "MatMul",
        "empty inner dimension",
        "p = MatMul(a, b) z = Add(x, p) y = MatMul(z, w)",
        x=(2, 3),
        w=(3, 4),
        a=(2, 0),
        b=(0, 3),
    ),
)
