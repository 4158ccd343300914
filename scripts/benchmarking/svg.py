"""The frame and colours of all pictures."""

from collections.abc import Iterable

# Mid-tones that are readable on white and on black.
INK, GRID = "#7d8590", "#7d859055"


def svg_document(width: int, height: int, title: str, elements: Iterable[str]) -> str:
    """A plain SVG; `title` is its accessible description."""
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    return "\n".join([frame, f"<title>{title}</title>", *elements, "</svg>", ""])
