from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.gradients.gradient_case import Case, case, errors, normal

_RUNS = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
# The longest axis, by the number of spatial axes.
_MAX_EXTENT = {1: 18, 2: 12, 3: 7}


@st.composite
def windows(draw: st.DrawFn) -> dict[str, list[int]]:
    rank = draw(st.sampled_from([1, 2, 2, 3]))

    def each(*choices: int, count: int = rank) -> list[int]:
        return draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))

    return {
        "extent": draw(st.lists(st.integers(1, _MAX_EXTENT[rank]), min_size=rank, max_size=rank)),
        "kernel": each(1, 2, 3, 4, 5),
        "strides": each(1, 1, 2, 3, 4),
        "dilations": each(1, 1, 2, 3),
        "pads": each(0, 0, 1, 2, 3, count=2 * rank),
    }


def _padded(drawn: dict[str, list[int]]) -> list[int]:
    rank, pads = len(drawn["extent"]), drawn["pads"]
    return [size + pads[axis] + pads[rank + axis] for axis, size in enumerate(drawn["extent"])]


def _reach(drawn: dict[str, list[int]]) -> list[int]:
    return [(k - 1) * d + 1 for k, d in zip(drawn["kernel"], drawn["dilations"], strict=True)]


def _written(drawn: dict[str, list[int]], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={drawn[name]}" for name in names)


def _is_right(entry: Case) -> bool:
    try:
        found = errors(entry)
    except ValueError as error:
        # The gradient vanishes by chance.
        assume("too small" not in str(error))
        raise
    return max(found.values()) <= entry.tolerance


@_RUNS
@given(drawn=windows(), groups=st.integers(1, 3), inputs=st.integers(1, 3), outputs=st.integers(1, 3))
def test_convolution(drawn: dict[str, list[int]], groups: int, inputs: int, outputs: int):
    assume(all(size >= reach for size, reach in zip(_padded(drawn), _reach(drawn), strict=True)))
    attributes = f"group={groups}, {_written(drawn, ('strides', 'dilations', 'pads'))}"
    entry = case(
        "Conv",
        f"{inputs} to {outputs}, {drawn}",
        f"y = Conv<{attributes}>(x, w, b)",
        x=(2, groups * inputs, *drawn["extent"]),
        w=(groups * outputs, inputs, *drawn["kernel"]),
        b=normal(groups * outputs),
    )
    assert _is_right(entry)


@_RUNS
@given(drawn=windows(), groups=st.integers(1, 3), inputs=st.integers(1, 3), outputs=st.integers(1, 3), data=st.data())
def test_transposed_convolution(
    drawn: dict[str, list[int]], groups: int, inputs: int, outputs: int, data: st.DataObject
):
    rank = len(drawn["extent"])
    extent = [min(size, 5) for size in drawn["extent"]]
    padding = [data.draw(st.integers(0, stride - 1)) for stride in drawn["strides"]]
    whole = [
        stride * (size - 1) + extra + reach
        for stride, size, extra, reach in zip(drawn["strides"], extent, padding, _reach(drawn), strict=True)
    ]
    pads = drawn["pads"]
    assume(all(whole[axis] > pads[axis] + pads[rank + axis] for axis in range(rank)))
    attributes = f"group={groups}, output_padding={padding}, {_written(drawn, ('strides', 'dilations', 'pads'))}"
    entry = case(
        "ConvTranspose",
        f"{inputs} to {outputs}, {drawn}",
        f"y = ConvTranspose<{attributes}>(x, w, b)",
        x=(2, groups * inputs, *extent),
        w=(groups * inputs, outputs, *drawn["kernel"]),
        b=normal(groups * outputs),
    )
    assert _is_right(entry)


@_RUNS
@given(drawn=windows(), operator=st.sampled_from(["MaxPool", "AveragePool"]), counts_pads=st.booleans())
def test_pooling(drawn: dict[str, list[int]], operator: str, counts_pads: bool):
    if operator == "AveragePool":
        drawn = drawn | {"dilations": [1] * len(drawn["extent"])}
    assume(all(size >= reach for size, reach in zip(_padded(drawn), _reach(drawn), strict=True)))
    # A window with padding only has no maximum and no mean.
    assume(all(pad < size for pad, size in zip(drawn["pads"], _reach(drawn) * 2, strict=True)))
    assume(all(pad < size for pad, size in zip(drawn["pads"], drawn["kernel"] * 2, strict=True)))
    names = {"kernel_shape": "kernel", "strides": "strides", "pads": "pads"}
    if operator == "MaxPool":
        names["dilations"] = "dilations"
    attributes = ", ".join(f"{name}={drawn[key]}" for name, key in names.items())
    if operator == "AveragePool":
        attributes += f", count_include_pad={int(counts_pads)}"
    entry = case(operator, f"{attributes}, {drawn}", f"y = {operator}<{attributes}>(x)", x=(2, 2, *drawn["extent"]))
    assert _is_right(entry)


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """An Einsum equation of one to four operands and their shapes; letters may repeat anywhere."""
    size = {letter: draw(st.integers(2, 4)) for letter in "abcd"}
    under = draw(st.lists(st.integers(1, 3), max_size=2))
    has_ellipsis = draw(st.booleans())
    terms, shapes = [], []
    for _ in range(draw(st.integers(1, 4))):
        letters = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3))
        place = draw(st.integers(0, len(letters)))
        dots = [*letters[:place], *(["..."] if has_ellipsis else []), *letters[place:]]
        terms.append("".join(dots))
        shape: list[int] = []
        for label in dots:
            shape += [draw(st.sampled_from([1, x])) for x in under] if label == "..." else [size[label]]
        shapes.append(tuple(shape))
    used = sorted(set("".join(terms)) - {"."})
    result = draw(st.permutations(used))[: draw(st.integers(0, len(used)))]
    place = draw(st.integers(0, len(result)))
    right = [*result[:place], *(["..."] if has_ellipsis else []), *result[place:]]
    return f"{','.join(terms)}->{''.join(right)}", shapes


@_RUNS
@given(drawn=equations())
def test_einsum(drawn: tuple[str, list[tuple[int, ...]]]):
    equation, shapes = drawn
    names = [f"a{index}" for index in range(len(shapes))]
    rank = torch.einsum(equation, *(torch.zeros(shape) for shape in shapes)).ndim
    # An output needs at least one axis, so the result gets one more.
    weigh: dict[str, Any] = {"w": normal(2, *(1,) * rank), "frozen": ("w",)}
    entry = case(
        "Einsum",
        f"{equation} of {shapes}",
        f'e = Einsum<equation="{equation}">({", ".join(names)}) y = Mul(e, w)',
        formula=lambda o: torch.einsum(equation, *(o[name] for name in names)) * o["w"],
        tolerance=1e-4,
        **{name: normal(*shape) for name, shape in zip(names, shapes, strict=True)},
        **weigh,
    )
    assert _is_right(entry)
