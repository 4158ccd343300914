"""Patterns for names of weights."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches(name: str, glob: str) -> bool:
    """Whether a name is a glob's; brackets may also stand for themselves, as in `layers[0].*`."""
    return name == glob or fnmatchcase(name, glob) or fnmatchcase(name, glob.replace("[", "[[]"))
