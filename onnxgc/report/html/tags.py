"""HTML and SVG in which a model's text is escaped."""

from __future__ import annotations

import html
from typing import TypeAlias

Attribute: TypeAlias = str | int | float | bool | None
_VOID = frozenset({"br", "input", "link", "meta"})


class Html(str):
    """Text that is HTML already; a tag escapes all other text."""

    __slots__ = ()


def escaped(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(text, quote=True))


def tag(element: str, /, *children: str, **attributes: Attribute) -> Html:
    """An element; `class_` becomes `class`, `aria_label` `aria-label`; None and False are left out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    end = "" if element in _VOID else f"{''.join(map(escaped, children))}</{element}>"
    return Html(f"<{element}{written}>{end}")


def joined(*parts: str) -> Html:
    return Html("\n".join(map(escaped, parts)))
