"""Numbers as users read them."""

from collections.abc import Mapping, Sequence

MEGABYTE = 10**6


def megabytes(size_bytes: float) -> str:
    """Bytes as MB (10^6) with the significant digits.

    >>> megabytes(144_723_560), megabytes(1_472_356), megabytes(1_472)
    ('145 MB', '1.5 MB', '0.001 MB')
    """
    size = size_bytes / MEGABYTE
    return f"{size:,.0f} MB" if size >= 100 else f"{size:.1f} MB" if size >= 1 else f"{size:.3f} MB"


def figure(size_bytes: float) -> str:
    """MB without the unit, which the heading states."""
    size = size_bytes / MEGABYTE
    return f"{size:,.0f}" if size >= 1000 else f"{size:,.1f}" if size >= 1 else f"{size:.3f}"


def percent(ratio: float) -> str:
    """A share with the significant digits.

    >>> percent(0.0123), percent(0.123), percent(1.23)
    ('1.23%', '12.3%', '123%')
    """
    size = 100 * ratio
    return f"{size:.0f}%" if size >= 100 else f"{size:.1f}%" if size >= 10 else f"{size:.2f}%"


def duration(seconds: float) -> str:
    """Seconds, milliseconds or microseconds with three digits.

    >>> duration(0.01234), duration(0.0000123)
    ('12.3 ms', '12.3 us')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.3g} us"


def in_module(name: str, modules: Mapping[str, str]) -> str:
    """The module after a name, as ` in 'blocks.11.mlp.act'`, or nothing."""
    return f" in '{modules[name]}'" if modules.get(name) else ""


def bound_text(bound_bytes: int, operator: str, modules: Mapping[str, str]) -> str:
    """A lower bound, with the operator whose working set it is, if any."""
    at = f" (the working set of '{operator}'{in_module(operator, modules)})" if operator else ""
    return megabytes(bound_bytes) + at


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
