"""Cases of reductions, of softmax and of operators that move elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gradients.gradient_case import Case, Formula, case, normal

_CUBE = (2, 3, 4)


def _on_cube(rule: str, name: str, attributes: str = "", inputs: str = "x", **settings: Any) -> Case:
    """One operator on x [2, 3, 4]."""
    operator = f"{rule}<{attributes}>" if attributes else rule
    return case(rule, name, f"y = {operator}({inputs})", **{"x": normal(*_CUBE), **settings})


def _reductions(rule: str) -> tuple[Case, ...]:
    def to_scalar(name: str, inputs: str, attributes: str = "keepdims=0", **settings: Any) -> Case:
        """The result, spread over two elements: the reference compares with a target of at least one axis."""
        body = f"s = {rule}<{attributes}>({inputs}) y = Mul(s, spread)"
        return case(rule, name, body, **{"x": normal(*_CUBE), "spread": normal(2), **settings})

    return (
        _on_cube(rule, "no axes"),
        to_scalar("no axes, keepdims 0", "x"),
        _on_cube(rule, "one axis", "", "x, axes", axes=[1]),
        _on_cube(rule, "one axis, keepdims 0", "keepdims=0", "x, axes", axes=[1]),
        _on_cube(rule, "negative axis", "keepdims=0", "x, axes", axes=[-1]),
        _on_cube(rule, "several axes out of order", "keepdims=0", "x, axes", axes=[-1, 0]),
        _on_cube(rule, "several axes kept", "keepdims=1", "x, axes", axes=[2, 1]),
        to_scalar("all axes", "x, axes", axes=[0, 1, 2]),
        to_scalar("empty axes reduce all", "x, axes", axes=[]),
        _on_cube(rule, "empty axes reduce nothing", "noop_with_empty_axes=1", "x, axes", axes=[]),
        _on_cube(rule, "absent axes reduce nothing", "noop_with_empty_axes=1, keepdims=0"),
        _on_cube(rule, "an axis of one", "keepdims=0", "x, axes", x=normal(2, 1, 4), axes=[1]),
        to_scalar("vector", "x", x=normal(5)),
        _on_cube(rule, "axes as attribute, opset 11", "axes=[-2], keepdims=0", opset=11),
        to_scalar("no axes, opset 11", "x", opset=11),
    )


def _softmaxes(rule: str) -> tuple[Case, ...]:
    return (
        _on_cube(rule, "axis by default"),
        *(_on_cube(rule, f"axis {axis}", f"axis={axis}") for axis in (0, 1, 2, -2, -3)),
        _on_cube(rule, "vector", x=normal(5)),
        _on_cube(rule, "four axes", "axis=1", x=normal(2, 5, 2, 3)),
        # Up to opset 12 all axes from `axis` on count as one.
        _on_cube(rule, "axis by default, opset 11", opset=11),
        _on_cube(rule, "axis 0, opset 11", "axis=0", opset=11),
        _on_cube(rule, "axis 2, opset 11", "axis=2", opset=11),
        _on_cube(rule, "axis -1, opset 12", "axis=-1", opset=12),
        _on_cube(rule, "axis 1, opset 9", "axis=1", opset=9),
        _on_cube(rule, "matrix, opset 9", x=normal(3, 4), opset=9),
    )


def _scaled(rule: str, name: str, operator: str, shape: tuple[int, ...], **settings: Any) -> Case:
    """A view, read by an Exp: mse of a bare view would not notice where elements go."""
    return case(rule, name, f"v = {operator} y = Exp(v)", x=normal(*shape), **settings)


_LAST = np.iinfo(np.int64).max
_FIRST = np.iinfo(np.int64).min


def _slice(name: str, starts: list[int], ends: list[int], *further: list[int], **settings: Any) -> Case:
    """y = x[starts:ends], with axes and steps where given, on x [4, 5, 6]."""
    inputs = dict(zip(("starts", "ends", "axes", "steps"), (starts, ends, *further), strict=False))
    body = f"y = Slice(x, {', '.join(inputs)})"
    return case("Slice", name, body, **{"x": normal(4, 5, 6), **inputs, **settings})


def _pad(name: str, pads: list[int], inputs: str = "x, pads", **settings: Any) -> Case:
    return case("Pad", name, f"y = Pad({inputs})", **{"x": normal(*_CUBE), "pads": pads, **settings})


def _pad_by_axes(operands: Mapping[str, Tensor]) -> Tensor:
    """Axis 0 between one and two rows, axis 2 without its first two columns."""
    return torch.nn.functional.pad(operands["x"], (-2, 0, 0, 0, 1, 2), value=0.5)


def _padded_as(mode: str, pads: list[int]) -> Formula:
    """By numpy's padding of the elements' numbers, once what is cut is gone."""
    rank = len(pads) // 2

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        numbers = np.arange(x.numel()).reshape(x.shape)
        for axis, (before, after) in enumerate(zip(pads[:rank], pads[rank:], strict=True)):
            extent = x.shape[axis]
            numbers = numbers.take(range(max(0, -before), extent - max(0, -after)), axis)
            width = [(0, 0)] * rank
            width[axis] = max(0, before), max(0, after)
            numbers = np.pad(numbers, width, mode=mode)  # type: ignore[call-overload]
        return torch.exp(x.reshape(-1)[torch.from_numpy(numbers)])

    return formula


def _pad_mode(
    mode: str, name: str, pads: list[int], shape: tuple[int, ...] = (4, 3, 4), **settings: Any
) -> Case:
    body = f'v = Pad<mode="{mode}">(x, pads) y = Exp(v)'
    formula = _padded_as(mode, pads)
    return case("Pad", f"{mode}, {name}", body, x=normal(*shape), pads=pads, formula=formula, **settings)


def _constant_pad(x: Tensor, value: Tensor) -> Tensor:
    """x [2, 3, 4] with pads [0, 1, -1, 2, 0, 3]."""
    inside = torch.nn.functional.pad(torch.ones_like(x[:, :, 1:]), (0, 3, 1, 0, 0, 2))
    return torch.nn.functional.pad(x[:, :, 1:], (0, 3, 1, 0, 0, 2)) + (1 - inside) * value


def _split(name: str, body: str, *shape: int, **settings: Any) -> Case:
    return case("Split", name, body, x=normal(*(shape or (2, 7, 3))), **settings)


def _moved(
    rule: str, name: str, attributes: str, shape: tuple[int, ...], formula: Formula, **settings: Any
) -> Case:
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
            # Torch's order is CRD.
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


def _crop(
    name: str, shape: tuple[int, ...], to: list[int], parts: list[tuple[int, int]], **settings: Any
) -> Case:
    """`parts` are the elements of each axis that y shows, some of them outside of x."""

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        pads = [(-start, stop - extent) for (start, stop), extent in zip(parts, x.shape, strict=True)]
        return torch.exp(torch.nn.functional.pad(x, [side for pair in reversed(pads) for side in pair]))

    attributes = f"<axes=[{', '.join(map(str, settings.pop('axes')))}]>" if "axes" in settings else ""
    body = f"v = CenterCropPad{attributes}(x, to) y = Exp(v)"
    return case("CenterCropPad", name, body, x=normal(*shape), to=to, formula=formula)


def _col2im(
    name: str,
    lead: tuple[int, int],
    image: tuple[int, int],
    block: list[int],
    attributes: str = "",
    **settings: Any,
) -> Case:
    """`lead` are the batch and the channels; the number of windows follows from the image."""
    batch, channels = lead
    probe = torch.nn.functional.unfold(torch.zeros(1, channels, *image), tuple(block), **settings)
    operator = f"Col2Im<{attributes}>" if attributes else "Col2Im"
    return case(
        "Col2Im",
        name,
        f"v = {operator}(x, image, block) y = Exp(v)",
        x=normal(batch, *probe.shape[1:]),
        image=list(image),
        block=block,
        formula=lambda operands: torch.exp(
            torch.nn.functional.fold(operands["x"], image, tuple(block), **settings)
        ),
    )


SHAPE_CASES = (
    *_reductions("ReduceSum"),
    *_reductions("ReduceMean"),
    *_softmaxes("Softmax"),
    *_softmaxes("LogSoftmax"),
    _scaled("Reshape", "plain", "Reshape(x, to)", _CUBE, to=[4, 6]),
    _scaled("Reshape", "0 and -1", "Reshape(x, to)", _CUBE, to=[0, -1]),
    _scaled("Reshape", "-1 first", "Reshape(x, to)", _CUBE, to=[-1, 2]),
    _scaled("Reshape", "axes of one", "Reshape(x, to)", _CUBE, to=[1, 2, 1, 12, 1]),
    case(
        "Reshape",
        "to a scalar",
        "s = Reshape(x, to) y = Mul(s, spread)",
        x=normal(1, 1),
        to=[],
        spread=normal(2),
    ),
    _scaled("Reshape", "of a scalar", "Reshape(x, to)", (), to=[1, 1]),
    _scaled("Reshape", "opset 13", "Reshape(x, to)", _CUBE, to=[3, -1], opset=13),
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
    _scaled("Flatten", "axis 0", "Flatten<axis=0>(x)", _CUBE),
    _scaled("Flatten", "axis 2", "Flatten<axis=2>(x)", _CUBE),
    _scaled("Flatten", "axis 3", "Flatten<axis=3>(x)", _CUBE),
    _scaled("Flatten", "axis -1", "Flatten<axis=-1>(x)", _CUBE),
    _scaled("Flatten", "vector", "Flatten<axis=0>(x)", (5,)),
    _scaled("Flatten", "opset 9", "Flatten<axis=2>(x)", _CUBE, opset=9),
    _scaled("Squeeze", "no axes", "Squeeze(x)", (1, 3, 1, 4)),
    _scaled("Squeeze", "one axis", "Squeeze(x, axes)", (1, 3, 1, 4), axes=[0]),
    _scaled("Squeeze", "negative axes", "Squeeze(x, axes)", (1, 3, 1, 4), axes=[-2, 0]),
    case("Squeeze", "to a scalar", "s = Squeeze(x) y = Mul(s, spread)", x=normal(1, 1), spread=normal(2)),
    _scaled("Squeeze", "axes as attribute, opset 11", "Squeeze<axes=[0, -2]>(x)", (1, 3, 1, 4), opset=11),
    _scaled("Squeeze", "no axes, opset 9", "Squeeze(x)", (1, 3, 1, 4), opset=9),
    _scaled("Unsqueeze", "one axis", "Unsqueeze(x, axes)", (3, 4), axes=[1]),
    _scaled("Unsqueeze", "several axes out of order", "Unsqueeze(x, axes)", (3, 4), axes=[-1, 0]),
    _scaled("Unsqueeze", "scalar", "Unsqueeze(x, axes)", (), axes=[0]),
    _scaled("Unsqueeze", "axes as attribute, opset 9", "Unsqueeze<axes=[0, 3]>(x)", (3, 4), opset=9),
    _scaled("Transpose", "perm by default", "Transpose(x)", _CUBE),
    _scaled("Transpose", "rotation", "Transpose<perm=[1,2,0]>(x)", _CUBE),
    _scaled("Transpose", "its inverse", "Transpose<perm=[2,0,1]>(x)", _CUBE),
    _scaled("Transpose", "four axes", "Transpose<perm=[2,0,3,1]>(x)", (2, 3, 4, 5)),
    _scaled("Transpose", "identity", "Transpose<perm=[0,1,2]>(x)", _CUBE),
    _scaled("Transpose", "vector", "Transpose(x)", (5,)),
    case("Transpose", "scalar", "s = Transpose(x) y = Mul(s, spread)", x=normal(), spread=normal(2)),
    case(
        "Concat",
        "negative axis, unequal sizes",
        "y = Concat<axis=-2>(x, a, b)",
        x=normal(2, 3, 2),
        a=normal(2, 1, 2),
        b=normal(2, 4, 2),
    ),
    case("Concat", "first axis", "y = Concat<axis=0>(x, a)", x=normal(2, 3), a=normal(1, 3)),
    case("Concat", "one input", "y = Concat<axis=1>(x)", x=normal(2, 3)),
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
    case(
        "Concat",
        "frozen first",
        "z = Concat<axis=1>(a, x) y = Exp(z)",
        x=normal(2, 3),
        a=normal(2, 2),
        frozen=("a",),
    ),
    case("Concat", "an empty input", "y = Concat<axis=0>(a, x)", x=normal(2, 3), a=normal(0, 3)),
    _slice("one axis in the middle", [1], [4], [1]),
    _slice("from the start", [0], [3], [2]),
    _slice("to the end", [2], [_LAST], [1]),
    _slice("everything", [0, 0], [_LAST, 6], [0, 2]),
    _slice("no axes", [1, 2, 0], [3, 4, 5]),
    _slice("no axes, fewer than the rank", [1, 2], [3, 4]),
    _slice("negative start and end", [-4], [-1], [2]),
    _slice("start in front of the axis, end behind it", [-99, 2], [3, 99], [1, 0]),
    _slice("negative axes out of order", [1, 2], [4, 4], [-1, -3]),
    _slice("step 2, even length", [0], [_LAST], [2], [2]),
    _slice("step 2, odd length", [0], [_LAST], [1], [2]),
    _slice("step 2 from the second", [1], [_LAST], [1], [2]),
    _slice("step 3, cut on both sides", [2], [_LAST], [0], [3], x=normal(13, 2)),
    _slice("step 3, several blocks free on both sides", [7], [12], [1], [3], x=normal(2, 20)),
    _slice("step longer than the axis", [3], [_LAST], [1], [7]),
    _slice("step -1, whole axis", [-1], [_FIRST], [2], [-1]),
    _slice("step -1, from behind the axis", [99], [-99], [1], [-1]),
    _slice("step -1, part", [4], [1], [2], [-1]),
    _slice("step -2", [-1], [_FIRST], [2], [-2]),
    _slice("step -2, part", [4], [0], [2], [-2]),
    _slice("step -3, part", [-3], [1], [0], [-3], x=normal(14, 2)),
    # ONNX begins at the first element, where Python takes none.
    _slice(
        "step -1, start in front of the axis",
        [-99],
        [_FIRST],
        [0],
        [-1],
        formula=lambda operands: operands["x"][:1],
    ),
    _slice("several axes and steps", [0, 3, -1], [_LAST, 1, _FIRST], [0, 1, 2], [2, -1, -2]),
    _slice("four axes, two of them strided", [1, 0], [_LAST, _LAST], [2, 3], [2, 3], x=normal(2, 3, 5, 7)),
    case(
        "Slice",
        "steps without axes",
        "y = Slice(x, starts, ends, , steps)",
        x=normal(4, 5),
        starts=[0, 1],
        ends=[_LAST, _LAST],
        steps=[2, 3],
    ),
    case(
        "Slice",
        "in int32",
        "y = Slice(x, starts, ends, axes, steps)",
        x=normal(4, 5),
        starts=np.asarray([-1], np.int32),
        ends=np.asarray([1], np.int32),
        axes=np.asarray([1], np.int32),
        steps=np.asarray([-2], np.int32),
    ),
    case(
        "Slice",
        "an empty result",
        "v = Slice(x, all, none, axes) u = Slice(x, all, two, axes) y = Concat<axis=1>(u, v)",
        x=normal(3, 4),
        all=[0],
        none=[0],
        two=[2],
        axes=[1],
    ),
    case(
        "Slice",
        "overlapping parts of one tensor",
        "u = Slice(x, zero, three, axes) v = Slice(x, one, four, axes) y = Mul(u, v)",
        x=normal(3, 4),
        zero=[0],
        one=[1],
        three=[3],
        four=[4],
        axes=[1],
    ),
    case(
        "Slice",
        "attributes, opset 9",
        "y = Slice<starts=[1,-3], ends=[3,99], axes=[0,2]>(x)",
        x=normal(4, 5, 6),
        opset=9,
    ),
    _slice("opset 11", [-1], [_FIRST], [1], [-2], opset=11),
    _pad("zeros around", [0, 1, 2, 0, 3, 1]),
    _pad("zeros in front only", [1, 0, 0, 0, 0, 0]),
    _pad("another constant", [0, 1, 2, 0, 3, 1], "x, pads, value", value=np.float32(1.5)),
    _pad("negative", [0, -1, -1, 0, 0, -2]),
    _pad("negative and positive", [1, -1, 2, 0, 2, -3]),
    case(
        "Pad",
        "all of one axis cut",
        "u = Pad(x, over) v = Pad(x, one) y = Add(u, v)",
        x=normal(3, 4),
        over=[0, 3, 0, -5],
        one=[0, 0, 0, -2],
        formula=lambda operands: operands["x"][:, :2],
    ),
    _pad(
        "axes",
        [1, -2, 2, 0],
        "x, pads, value, axes",
        value=np.float32(0.5),
        axes=[0, -1],
        formula=_pad_by_axes,
    ),
    _pad_mode("reflect", "around", [0, 1, 2, 0, 2, 1]),
    _pad_mode("reflect", "as far as it goes", [1, 0, 3, 1, 2, 0]),
    _pad_mode("reflect", "in front only", [0, 2, 0, 0, 0, 0]),
    _pad_mode("reflect", "image", [0, 0, 2, 1, 0, 0, 1, 3], (1, 2, 4, 5)),
    _pad_mode("reflect", "and cut", [0, -1, 2, 0, 1, -1]),
    _pad_mode("edge", "around", [0, 1, 2, 3, 4, 1]),
    _pad_mode("edge", "and cut", [2, -1, -1, 0, 4, 2]),
    _pad_mode("edge", "to nothing elsewhere", [0, 0, 0, 0, 0, 3]),
    _pad_mode("wrap", "around", [0, 1, 2, 0, 2, 1], opset=19),
    _pad_mode("wrap", "more than once", [3, 1, 9, 0, 5, 1], opset=19),
    _pad_mode("wrap", "and cut", [2, -1, 3, 0, 5, -1], opset=19),
    _pad_mode("edge", "opset 11", [0, 1, 2, 1, 0, 0], opset=11),
    case(
        "Pad",
        "reflect, opset 9",
        'v = Pad<mode="reflect", pads=[0,1,2,0,0,1]>(x) y = Exp(v)',
        x=normal(*_CUBE),
        opset=9,
        formula=_padded_as("reflect", [0, 1, 2, 0, 0, 1]),
    ),
    case(
        "Pad",
        "reflect along axes",
        'v = Pad<mode="reflect">(x, pads, , axes) y = Exp(v)',
        x=normal(*_CUBE),
        pads=[2, 1, -1, 0],
        axes=[-1, 0],
        formula=_padded_as("reflect", [1, 0, 2, 0, 0, -1]),
    ),
    case(
        "Pad",
        "by a trained constant",
        "s = ReduceSum<keepdims=0>(a) v = Pad(x, pads, s) y = Exp(v)",
        x=normal(*_CUBE),
        a=normal(2),
        pads=[0, 1, -1, 2, 0, 3],
        formula=lambda operands: torch.exp(_constant_pad(operands["x"], operands["a"].sum())),
    ),
    case(
        "Pad",
        "by a trained constant along an axis",
        "v = Pad(x, pads, a, axes) y = Exp(v)",
        x=normal(*_CUBE),
        a=normal(),
        pads=[1, 2],
        axes=[1],
        formula=lambda operands: torch.exp(
            torch.cat(
                [
                    operands["a"].expand(2, 1, 4),
                    operands["x"],
                    operands["a"].expand(2, 2, 4),
                ],
                1,
            )
        ),
    ),
    _pad("vector", [2, 1], x=normal(5)),
    case(
        "Pad", "attributes, opset 9", "y = Pad<pads=[0,1,2,0,0,1], value=0.5>(x)", x=normal(*_CUBE), opset=9
    ),
    _pad("opset 11", [0, 1, 2, 0, 3, 1], opset=11),
    _split(
        "unequal pieces",
        "a, b = Split<axis=1>(x, sizes) u = Exp(a) v = Tanh(b) y = Concat<axis=1>(v, u)",
        sizes=[3, 4],
    ),
    _split(
        "three pieces of a negative axis",
        "a, b, c = Split<axis=-1, num_outputs=3>(x) u = Mul(a, b) y = Mul(u, c)",
    ),
    _split(
        "shorter last piece",
        "a, b, c = Split<axis=1, num_outputs=3>(x) u = Mul(a, b) v = Exp(c) y = Concat<axis=1>(u, v)",
    ),
    _split("axis by default", "a, b = Split<num_outputs=2>(x) y = Mul(a, b)"),
    _split("one piece", "a = Split<axis=1, num_outputs=1>(x) y = Exp(a)"),
    _split("first piece unread", "a, b = Split<axis=1>(x, sizes) y = Exp(b)", sizes=[3, 4]),
    _split("middle piece unread", "a, b, c = Split<axis=1>(x, sizes) y = Mul(a, c)", sizes=[2, 3, 2]),
    _split(
        "a piece read by two",
        "a, b = Split<axis=1>(x, sizes) u = Exp(a) v = Mul(u, a) y = Concat<axis=1>(v, b)",
        sizes=[3, 4],
    ),
    _split(
        "an empty piece", "a, b, c = Split<axis=1>(x, sizes) y = Concat<axis=1>(b, c, a)", sizes=[3, 0, 4]
    ),
    _split("equal pieces, opset 13", "a, b = Split<axis=0>(x) y = Mul(a, b)", opset=13),
    _split(
        "sizes as attribute, opset 9",
        "a, b = Split<axis=1, split=[3,4]>(x) u = Exp(a) y = Concat<axis=1>(b, u)",
        opset=9,
    ),
    case(
        "ReduceSum",
        "over an empty axis",
        "s = ReduceSum<keepdims=0>(a, axes) y = Add(x, s)",
        x=normal(2, 3),
        a=normal(2, 0, 3),
        axes=[1],
    ),
    _moved("DepthToSpace", "by default", "blocksize=2", (2, 8, 3, 2), _depth_to_space(2, "DCR")),
    _moved("DepthToSpace", "DCR", 'blocksize=3, mode="DCR"', (1, 18, 2, 1), _depth_to_space(3, "DCR")),
    _moved("DepthToSpace", "CRD", 'blocksize=2, mode="CRD"', (2, 12, 3, 2), _depth_to_space(2, "CRD")),
    _moved("DepthToSpace", "opset 9", "blocksize=2", (2, 8, 3, 2), _depth_to_space(2, "DCR"), opset=9),
    _moved("SpaceToDepth", "blocks of two", "blocksize=2", (2, 3, 4, 6), _space_to_depth(2)),
    _moved("SpaceToDepth", "blocks of three", "blocksize=3", (1, 2, 3, 6), _space_to_depth(3)),
    _moved("SpaceToDepth", "opset 9", "blocksize=2", (2, 3, 4, 2), _space_to_depth(2), opset=9),
    _crop("crop", (5, 7), [2, 4], [(1, 3), (1, 5)]),
    _crop("pad", (4, 3), [7, 4], [(-1, 6), (0, 4)]),
    _crop("crop and pad", (5, 3), [2, 6], [(1, 3), (-1, 5)]),
    _crop("axes", (2, 5, 3), [8, 4], [(0, 2), (0, 4), (-2, 6)], axes=[-1, 1]),
    _col2im("plain", (2, 3), (5, 5), [2, 2]),
    _col2im(
        "pads and strides",
        (1, 2),
        (6, 5),
        [3, 2],
        "pads=[1,0,1,0], strides=[2,1]",
        padding=(1, 0),
        stride=(2, 1),
    ),
    _col2im("dilated", (1, 2), (6, 7), [2, 3], "dilations=[2,2]", dilation=(2, 2)),
)
