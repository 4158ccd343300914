"""Patterns for names of weights."""

from fnmatch import fnmatchcase


def matches(name: str, glob: str) -> bool:
    """Whether a glob matches a name; brackets may be literal, as in `layers[0].*`.

    >>> matches("layers[0].weight", "layers[0].*")
    True
    """
    return name == glob or fnmatchcase(name, glob) or fnmatchcase(name, glob.replace("[", "[[]"))
