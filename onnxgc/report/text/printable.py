"""Text of unknown origin in a form that is safe to print."""

import re
import unicodedata

MAX_NAME_LENGTH = 120
_TAIL = 20
_LONG_WORD = re.compile(rf"[^\s'\"]{{{MAX_NAME_LENGTH + 1},}}")


def printable(text: str) -> str:
    r"""The text with control, bidirectional and non-printing characters escaped and long names cut.

    Line ends stay, since tables contain them.

    >>> printable("a\x1b[31m\u202eb"), len(printable("x" * 1000))
    ('a\\x1b[31m\\u202eb', 120)
    """
    text = without_controls(text)
    return text if len(text) <= MAX_NAME_LENGTH else _LONG_WORD.sub(_cut, text)


def without_controls(text: str) -> str:
    """The text with control, bidirectional and non-printing characters escaped, at full length."""
    if text.isprintable():
        return text
    return "".join(character if _is_shown(character) else _escaped(character) for character in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character == "\n" or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _cut(match: re.Match[str]) -> str:
    """The beginning and the end of a name: names of one model often begin alike."""
    return f"{match[0][: MAX_NAME_LENGTH - _TAIL - 3]}...{match[0][-_TAIL:]}"
