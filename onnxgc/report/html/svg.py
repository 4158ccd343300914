"""SVG as wide as the page, with text of constant size.

Shapes are in an inner picture that is stretched to the width; text and marks are outside of it, at shares of
the width.
"""

from collections.abc import Sequence
from itertools import pairwise

from onnxgc.report.html.tags import Html, tag

WIDTH = 1000
"""Width of the inner picture in units, and the maximum number of columns, about that of a screen."""


def columns(count: int) -> list[range]:
    """`count` places in order, grouped into at most `WIDTH` columns of nearly equal width."""
    number = min(count, WIDTH)
    edges = [place * count // number for place in range(number + 1)] if number else [0]
    return [range(first, last) for first, last in pairwise(edges)]


def coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def steps_path(heights: Sequence[float], share: float = 1.0) -> str:
    """A line through columns, each at its own height, over that share of the width."""
    path: list[str] = []
    before = None
    for number, height in enumerate(map(coordinate, heights)):
        if height == before:
            continue
        left = coordinate(number * share * WIDTH / len(heights))
        path.append(f"M{left} {height}" if before is None else f"H{left}V{height}")
        before = height
    return "".join(path) + (f"H{coordinate(share * WIDTH)}" if path else "")


def area_path(heights: Sequence[float], bottom: float, share: float = 1.0) -> str:
    """The area between the line of `steps_path` and the bottom."""
    line = steps_path(heights, share)
    return f"{line}V{coordinate(bottom)}H0Z" if line else ""


def blocks_path(filled: Sequence[bool], top: float, height: float, share: float = 1.0) -> str:
    """A row of blocks at the filled columns; neighbours form one block."""
    path: list[str] = []
    start = None
    for number, is_filled in enumerate([*filled, False]):
        if is_filled and start is None:
            start = number
        elif not is_filled and start is not None:
            left, right = (coordinate(place * share * WIDTH / len(filled)) for place in (start, number))
            path.append(f"M{left} {coordinate(top)}H{right}v{coordinate(height)}H{left}Z")
            start = None
    return "".join(path)


def stretched(height: int, *shapes: str) -> Html:
    return tag("svg", *shapes, viewBox=f"0 0 {WIDTH} {height}", preserveAspectRatio="none", width="100%", height=height)


def quarters(count: int) -> list[str]:
    """Numbers of places, from 1, at the quarters of a picture."""
    return [f"{min(count * number // 4 + 1, count):,}" for number in range(5)]


def place_marks(count: int, unit: str, y: float) -> list[Html]:
    """The numbers at the quarters of a picture; the first one with its unit."""
    return [
        tag(
            "text",
            place if number else f"{unit} {place}",
            x=percent_of_width(number / 4),
            y=y,
            text_anchor="start" if not number else "end" if number == 4 else "middle",
            class_="mark between" if number % 2 else "mark",
        )
        for number, place in enumerate(quarters(count))
    ]


def percent_of_width(share: float) -> str:
    return f"{coordinate(100 * share)}%"


def label_beside(text: str, share: float, y: float, gap: int, class_: str) -> Html:
    """A label at a distance from a share of the width, on the side with more room."""
    side, anchor = (-1, "end") if share > 0.5 else (1, "start")
    return tag(
        "text", text, x=percent_of_width(share), dx=side * gap, y=coordinate(y), text_anchor=anchor, class_=class_
    )


def ticks(highest: float, wanted: int = 8) -> list[float]:
    """Round values from 0 to `highest`, about `wanted` of them."""
    if highest <= 0:
        return [0.0]
    scale = 10.0
    while scale > highest / wanted:
        scale /= 10
    while scale * 10 <= highest / wanted:
        scale *= 10
    distance = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor * wanted >= highest)
    return [number * distance for number in range(int(highest / distance) + 1)]


def level_lines(levels: Sequence[tuple[float, str]]) -> Html:
    """Horizontal lines at given heights, with labels to the left of the picture."""
    return Html(
        "".join(
            tag("line", x1=0, x2="100%", y1=coordinate(y), y2=coordinate(y), class_="grid")
            + tag("text", label, x=-8, y=coordinate(y + 4), text_anchor="end")
            for y, label in levels
        )
    )
