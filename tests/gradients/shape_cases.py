from typing import Any

from tests.gradients.gradient_case import Case, case, linear_case, normal, operator

_CUBE = (2, 3, 4)


def _scaled(rule: str, name: str, operator: str, shape: tuple[int, ...], **settings: Any) -> Case:
    """A view read by an Exp: with the mse of a bare view, the order of elements would not matter."""
    return case(rule, name, f"v = {operator} y = Exp(v)", x=shape, **settings)


def _split(name: str, body: str, *shape: int, **settings: Any) -> Case:
    return case("Split", name, body, x=normal(*(shape or (2, 7, 3))), **settings)


def _tile(name: str, shape: tuple[int, ...], repeats: list[int]) -> Case:
    return linear_case("Tile", name, "Tile(x, repeats)", shape, repeats=repeats)


def _col2im(name: str, shape: tuple[int, ...], image: list[int], block: list[int], attributes: str = "") -> Case:
    return linear_case(
        "Col2Im", name, f"{operator('Col2Im', attributes)}(x, image, block)", shape, image=image, block=block
    )


def _expand(name: str, shape: tuple[int, ...], to: list[int], **settings: Any) -> Case:
    return case("Expand", name, "v = Expand(x, to) y = Mul(v, w)", x=shape, to=to, **settings)


SHAPE_CASES = (
    _scaled("Reshape", "0 and -1", "Reshape(x, to)", _CUBE, to=[0, -1]),
    _scaled("Reshape", "axes of one", "Reshape(x, to)", _CUBE, to=[1, 2, 1, 12, 1]),
    case("Reshape", "to a scalar", "s = Reshape(x, to) y = Mul(s, spread)", x=(1, 1), to=[], spread=(2,)),
    _scaled("Reshape", "of a scalar", "Reshape(x, to)", (), to=[1, 1]),
    case(
        "Reshape",
        "empty",
        "v = Reshape<allowzero=1>(a, empty) z = Concat<axis=0>(x, v) y = Reshape(z, flat)",
        x=(3, 2),
        a=(0, 3),
        empty=[0, 2],
        flat=[6],
    ),
    _scaled("Flatten", "axis by default", "Flatten(x)", _CUBE),
    _scaled("Flatten", "axis -1", "Flatten<axis=-1>(x)", _CUBE),
    _scaled("Squeeze", "no axes", "Squeeze(x)", (1, 3, 1, 4)),
    case("Squeeze", "to a scalar", "s = Squeeze(x) y = Mul(s, spread)", x=(1, 1), spread=(2,)),
    _scaled("Squeeze", "axes as attribute, opset 11", "Squeeze<axes=[0, -2]>(x)", (1, 3, 1, 4), opset=11),
    _scaled("Unsqueeze", "several axes out of order", "Unsqueeze(x, axes)", (3, 4), axes=[-1, 0]),
    _scaled("Unsqueeze", "scalar", "Unsqueeze(x, axes)", (), axes=[0]),
    _scaled("Unsqueeze", "axes as attribute, opset 9", "Unsqueeze<axes=[0, 3]>(x)", (3, 4), opset=9),
    _scaled("Transpose", "perm by default", "Transpose(x)", _CUBE),
    _scaled("Transpose", "four axes", "Transpose<perm=[2,0,3,1]>(x)", (2, 3, 4, 5)),
    case("Transpose", "scalar", "s = Transpose(x) y = Mul(s, spread)", x=(), spread=(2,)),
    case(
        "Concat", "negative axis, unequal sizes", "y = Concat<axis=-2>(x, a, b)", x=(2, 3, 2), a=(2, 1, 2), b=(2, 4, 2)
    ),
    case("Concat", "with itself", "z = Concat<axis=1>(x, x) y = Mul(z, w)", x=(2, 3), w=(2, 6)),
    case("Concat", "frozen in the middle", "y = Concat<axis=1>(x, a, b)", x=(2, 3), a=(2, 2), b=(2, 4), frozen=("a",)),
    _split(
        "unequal pieces", "a, b = Split<axis=1>(x, sizes) u = Exp(a) v = Tanh(b) y = Concat<axis=1>(v, u)", sizes=[3, 4]
    ),
    _split("three pieces of a negative axis", "a, b, c = Split<axis=-1, num_outputs=3>(x) u = Mul(a, b) y = Mul(u, c)"),
    _split(
        "shorter last piece",
        "a, b, c = Split<axis=1, num_outputs=3>(x) u = Mul(a, b) v = Exp(c) y = Concat<axis=1>(u, v)",
    ),
    _split("axis by default", "a, b = Split<num_outputs=2>(x) y = Mul(a, b)"),
    _split("one piece", "a = Split<axis=1, num_outputs=1>(x) y = Exp(a)"),
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
    linear_case("DepthToSpace", "by default", "DepthToSpace<blocksize=2>(x)", (2, 8, 3, 2)),
    linear_case("DepthToSpace", "DCR", 'DepthToSpace<blocksize=3, mode="DCR">(x)', (1, 18, 2, 1)),
    linear_case("DepthToSpace", "CRD", 'DepthToSpace<blocksize=2, mode="CRD">(x)', (2, 12, 3, 2)),
    linear_case("SpaceToDepth", "blocks of three", "SpaceToDepth<blocksize=3>(x)", (1, 2, 3, 6)),
    _col2im("plain", (2, 12, 16), [5, 5], [2, 2]),
    _col2im("pads and strides", (1, 12, 12), [6, 5], [3, 2], "pads=[1,0,1,0], strides=[2,1]"),
    _col2im("dilated", (1, 12, 12), [6, 7], [2, 3], "dilations=[2,2]"),
    linear_case("ReverseSequence", "time first", "ReverseSequence(x, lengths)", (4, 3, 2), lengths=[4, 1, 3]),
    linear_case(
        "ReverseSequence",
        "batch first",
        "ReverseSequence<batch_axis=0, time_axis=1>(x, lengths)",
        (3, 4),
        lengths=[2, 4, 1],
    ),
    _expand("an axis", (3, 1, 4), [3, 2, 4], w=(3, 2, 4)),
    _expand("new axes", (3, 1), [2, 1, 1, 4], w=(2, 1, 3, 4)),
    _expand("shorter and smaller than x", (2, 3, 1), [1, 4], w=(2, 3, 4)),
    _expand("to its own shape", (2, 3), [2, 3], w=(2, 3)),
    _expand("five axes, opset 9", (1, 2, 1, 1, 3), [2, 1, 2, 1, 3], w=(2, 2, 2, 1, 3), opset=9),
    _tile("both axes", (2, 3), [3, 2]),
    _tile("once", (2, 3), [1, 1]),
    _tile("five axes", (1, 2, 1, 3, 2), [2, 2, 1, 1, 3]),
)
