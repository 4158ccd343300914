from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.gradients.gradient_case import Case, Formula, case, normal, operator

_CUBE = (2, 3, 4)


def _scaled(rule: str, name: str, operator: str, shape: tuple[int, ...], **settings: Any) -> Case:
    """A view read by an Exp: with the mse of a bare view, the order of elements would not matter."""
    return case(rule, name, f"v = {operator} y = Exp(v)", x=normal(*shape), **settings)


def _split(name: str, body: str, *shape: int, **settings: Any) -> Case:
    return case("Split", name, body, x=normal(*(shape or (2, 7, 3))), **settings)


def _moved(rule: str, name: str, attributes: str, shape: tuple[int, ...], formula: Formula, **settings: Any) -> Case:
    return case(
        rule,
        name,
        f"v = {rule}<{attributes}>(x) y = Exp(v)",
        x=normal(*shape),
        formula=lambda operands: torch.exp(formula(operands)),
        **settings,
    )


def _depth_to_space(block: int, mode: str) -> Formula:
    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        if mode == "DCR":
            # PyTorch's order is CRD.
            batch, channels, *image = x.shape
            x = x.reshape(batch, block * block, channels // block**2, *image).transpose(1, 2).flatten(1, 2)
        return torch.nn.functional.pixel_shuffle(x, block)

    return formula


def _space_to_depth(block: int) -> Formula:
    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        rows = [x[:, :, row::block, column::block] for row in range(block) for column in range(block)]
        return torch.cat(rows, 1)

    return formula


def _col2im(
    name: str, lead: tuple[int, int], image: tuple[int, int], block: list[int], attributes: str = "", **settings: Any
) -> Case:
    """`lead` are batch and channels; the number of windows follows from the image."""
    batch, channels = lead
    probe = torch.nn.functional.unfold(torch.zeros(1, channels, *image), tuple(block), **settings)
    return case(
        "Col2Im",
        name,
        f"v = {operator('Col2Im', attributes)}(x, image, block) y = Exp(v)",
        x=normal(batch, *probe.shape[1:]),
        image=list(image),
        block=block,
        formula=lambda operands: torch.exp(torch.nn.functional.fold(operands["x"], image, tuple(block), **settings)),
    )


def _reverse(name: str, shape: tuple[int, ...], lengths: list[int], time: int, batch: int, attributes: str) -> Case:
    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"].movedim((batch, time), (0, 1))
        rows = [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(x, lengths, strict=True)]
        return torch.exp(torch.stack(rows).movedim((0, 1), (batch, time)))

    return case(
        "ReverseSequence",
        name,
        f"v = {operator('ReverseSequence', attributes)}(x, lengths) y = Exp(v)",
        x=normal(*shape),
        lengths=lengths,
        formula=formula,
    )


def _expand(name: str, shape: tuple[int, ...], to: list[int], **settings: Any) -> Case:
    return case("Expand", name, "v = Expand(x, to) y = Mul(v, w)", x=normal(*shape), to=to, **settings)


def _tile(name: str, shape: tuple[int, ...], repeats: list[int], **settings: Any) -> Case:
    tiled = [size * count for size, count in zip(shape, repeats, strict=True)]
    return case(
        "Tile",
        name,
        "v = Tile(x, repeats) y = Mul(v, w)",
        x=normal(*shape),
        w=normal(*tiled),
        repeats=repeats,
        formula=lambda operands: operands["x"].repeat(*repeats) * operands["w"],
        **settings,
    )


SHAPE_CASES = (
    _scaled("Reshape", "0 and -1", "Reshape(x, to)", _CUBE, to=[0, -1]),
    _scaled("Reshape", "axes of one", "Reshape(x, to)", _CUBE, to=[1, 2, 1, 12, 1]),
    case("Reshape", "to a scalar", "s = Reshape(x, to) y = Mul(s, spread)", x=normal(1, 1), to=[], spread=normal(2)),
    _scaled("Reshape", "of a scalar", "Reshape(x, to)", (), to=[1, 1]),
    case(
        "Reshape",
        "empty",
        "v = Reshape<allowzero=1>(a, empty) z = Concat<axis=0>(x, v) y = Reshape(z, flat)",
        x=normal(3, 2),
        a=normal(0, 3),
        empty=[0, 2],
        flat=[6],
    ),
    _scaled("Flatten", "axis by default", "Flatten(x)", _CUBE),
    _scaled("Flatten", "axis -1", "Flatten<axis=-1>(x)", _CUBE),
    _scaled("Squeeze", "no axes", "Squeeze(x)", (1, 3, 1, 4)),
    case("Squeeze", "to a scalar", "s = Squeeze(x) y = Mul(s, spread)", x=normal(1, 1), spread=normal(2)),
    _scaled("Squeeze", "axes as attribute, opset 11", "Squeeze<axes=[0, -2]>(x)", (1, 3, 1, 4), opset=11),
    _scaled("Unsqueeze", "several axes out of order", "Unsqueeze(x, axes)", (3, 4), axes=[-1, 0]),
    _scaled("Unsqueeze", "scalar", "Unsqueeze(x, axes)", (), axes=[0]),
    _scaled("Unsqueeze", "axes as attribute, opset 9", "Unsqueeze<axes=[0, 3]>(x)", (3, 4), opset=9),
    _scaled("Transpose", "perm by default", "Transpose(x)", _CUBE),
    _scaled("Transpose", "four axes", "Transpose<perm=[2,0,3,1]>(x)", (2, 3, 4, 5)),
    case("Transpose", "scalar", "s = Transpose(x) y = Mul(s, spread)", x=normal(), spread=normal(2)),
    case(
        "Concat",
        "negative axis, unequal sizes",
        "y = Concat<axis=-2>(x, a, b)",
        x=normal(2, 3, 2),
        a=normal(2, 1, 2),
        b=normal(2, 4, 2),
    ),
    case("Concat", "with itself", "z = Concat<axis=1>(x, x) y = Mul(z, w)", x=normal(2, 3), w=normal(2, 6)),
    case(
        "Concat",
        "frozen in the middle",
        "y = Concat<axis=1>(x, a, b)",
        x=normal(2, 3),
        a=normal(2, 2),
        b=normal(2, 4),
        frozen=("a",),
    ),
    _split(
        "unequal pieces", "a, b = Split<axis=1>(x, sizes) u = Exp(a) v = Tanh(b) y = Concat<axis=1>(v, u)", sizes=[3, 4]
    ),
    _split("three pieces of a negative axis", "a, b, c = Split<axis=-1, num_outputs=3>(x) u = Mul(a, b) y = Mul(u, c)"),
    _split(
        "shorter last piece",
        "a, b, c = Split<axis=1, num_outputs=3>(x) u = Mul(a, b) v = Exp(c) y = Concat<axis=1>(u, v)",
    ),
    _split("first piece unread", "a, b = Split<axis=1>(x, sizes) y = Exp(b)", sizes=[3, 4]),
    _split(
        "a piece read by two",
        "a, b = Split<axis=1>(x, sizes) u = Exp(a) v = Mul(u, a) y = Concat<axis=1>(v, b)",
        sizes=[3, 4],
    ),
    _split("an empty piece", "a, b, c = Split<axis=1>(x, sizes) y = Concat<axis=1>(b, c, a)", sizes=[3, 0, 4]),
    _split("equal pieces, opset 13", "a, b = Split<axis=0>(x) y = Mul(a, b)", opset=13),
    _split(
        "sizes as attribute, opset 9",
        "a, b = Split<axis=1, split=[3,4]>(x) u = Exp(a) y = Concat<axis=1>(b, u)",
        opset=9,
    ),
    _moved("DepthToSpace", "by default", "blocksize=2", (2, 8, 3, 2), _depth_to_space(2, "DCR")),
    _moved("DepthToSpace", "DCR", 'blocksize=3, mode="DCR"', (1, 18, 2, 1), _depth_to_space(3, "DCR")),
    _moved("DepthToSpace", "CRD", 'blocksize=2, mode="CRD"', (2, 12, 3, 2), _depth_to_space(2, "CRD")),
    _moved("SpaceToDepth", "blocks of three", "blocksize=3", (1, 2, 3, 6), _space_to_depth(3)),
    _col2im("plain", (2, 3), (5, 5), [2, 2]),
    _col2im("pads and strides", (1, 2), (6, 5), [3, 2], "pads=[1,0,1,0], strides=[2,1]", padding=(1, 0), stride=(2, 1)),
    _col2im("dilated", (1, 2), (6, 7), [2, 3], "dilations=[2,2]", dilation=(2, 2)),
    _reverse("time first", (4, 3, 2), [4, 1, 3], 0, 1, ""),
    _reverse("batch first", (3, 4), [2, 4, 1], 1, 0, "batch_axis=0, time_axis=1"),
    _expand("an axis", (3, 1, 4), [3, 2, 4], w=normal(3, 2, 4)),
    _expand("new axes", (3, 1), [2, 1, 1, 4], w=normal(2, 1, 3, 4)),
    _expand("shorter and smaller than x", (2, 3, 1), [1, 4], w=normal(2, 3, 4)),
    _expand("to its own shape", (2, 3), [2, 3], w=normal(2, 3)),
    _expand("five axes, opset 9", (1, 2, 1, 1, 3), [2, 1, 2, 1, 3], w=normal(2, 2, 2, 1, 3), opset=9),
    _tile("both axes", (2, 3), [3, 2]),
    _tile("once", (2, 3), [1, 1]),
    _tile("five axes", (1, 2, 1, 3, 2), [2, 2, 1, 1, 3]),
)
