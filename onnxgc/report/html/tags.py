"""HTML and SVG in which a model's text is escaped."""

import html
from collections.abc import Iterable
from typing import TypeAlias

from onnxgc.report.text.printable import printable, without_controls

Attribute: TypeAlias = str | int | float | bool | None
_VOID = frozenset({"br", "input", "link", "meta"})


class Html(str):
    """Text that is HTML already; a tag escapes all other text."""

    __slots__ = ()


def escaped(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(printable(text), quote=True))


def tag(element: str, /, *children: str, **attributes: Attribute) -> Html:
    """An element; `class_` becomes `class`, `aria_label` `aria-label`; None and False are left out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(without_controls(str(value)))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    end = "" if element in _VOID else f"{''.join(map(escaped, children))}</{element}>"
    return Html(f"<{element}{written}>{end}")


def joined(*parts: str) -> Html:
    return Html("\n".join(map(escaped, parts)))


def name_tag(name: str, class_: str = "name") -> Html:
    return tag("span", name, class_=class_)


def name_in_module(name: str, module: str) -> Html:
    """A name with the path of its module below it, if it has one."""
    return joined(name_tag(name), tag("span", module, class_="name module")) if module else name_tag(name)


def bullets(lines: Iterable[str], class_: str | None = None) -> Html:
    return tag("ul", *(tag("li", line) for line in lines), class_=class_)


def definitions(entries: Iterable[tuple[str, str]], class_: str) -> Html:
    pairs = (tag("div", tag("dt", name), tag("dd", value)) for name, value in entries)
    return tag("dl", *pairs, class_=class_)
