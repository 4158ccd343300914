"""Memory budgets as people write them: `8GiB`, `500MB`, `60%`, `min`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

from onnxgc.errors import BudgetError, BudgetFormError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TOO_MANY_BYTES = 2**63
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*|%)\s*", re.IGNORECASE)
_HELP = "write 8GiB, 500MB, 60% (of the peak that stores everything) or min"


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget in bytes, as a share of the regular peak, or (neither) the least that can be had.

    The least may be asked for within a limit on extra time, a share of the time of every operator once.
    Shares are exact: 57% of 100 is 57. `held_bytes` are held besides all through, and the budget is for both.
    """

    size_bytes: int | None = None
    share: Fraction | None = None
    most_extra: Fraction | None = None
    held_bytes: int = 0

    @property
    def is_least(self) -> bool:
        return self.size_bytes is None and self.share is None

    def bytes_of(self, regular_peak_bytes: int) -> int:
        """What is left for a step of which storing everything takes `regular_peak_bytes`; not for the least.

        Raises:
            BudgetError: nothing is left.
        """
        assert not self.is_least
        whole = self.size_bytes
        if whole is None:
            whole = int((self.share or 0) * (regular_peak_bytes + self.held_bytes))
        if self.held_bytes and whole <= self.held_bytes:
            raise BudgetError(
                f"no plan fits into {whole:,} bytes: the optimizer's state alone takes {self.held_bytes:,}; "
                "give more memory, another optimizer, or freeze a part"
            )
        return whole - self.held_bytes


def parse_budget(given: str | float, unit_size: int | None = None) -> Budget:
    """A budget from text or a number: an int is bytes, a float below or equal to 1 a share.

    In text without a unit the same holds: `.8` is a share, `8000000` is bytes. With a `unit_size` a number
    above 1 is a size in that unit, a fraction too: `4.5`.

    >>> parse_budget("60%").share
    Fraction(3, 5)
    >>> parse_budget("1.5GiB").size_bytes
    1610612736

    Raises:
        BudgetFormError: it is none of these, or not above 0.
    """
    if isinstance(given, bool) or not isinstance(given, str | Real):
        raise BudgetFormError(f"the budget {given!r} is no size; {_HELP}")
    # Numbers of numpy are written as Python's.
    number: Any = given
    is_whole = hasattr(number, "__index__")
    text = number if isinstance(number, str) else str(int(number) if is_whole else float(number))
    if text.strip().lower() == "min":
        return Budget()
    found = _FORM.fullmatch(text)
    if found is None or (found[2].lower() not in _UNITS and found[2] != "%"):
        raise BudgetFormError(f"the budget '{text}' is no size; {_HELP}")
    amount, unit = Fraction(Decimal(found[1])), found[2].lower()
    is_share = unit == "%" or (not unit and "." in found[1] and (unit_size is None or amount <= 1))
    size = amount / 100 if unit == "%" else amount * _UNITS[unit]
    if size <= 0 or (size < 1 and not is_share):
        raise BudgetFormError(f"the budget '{text}' is nothing; {_HELP}")
    if size >= _TOO_MANY_BYTES:
        raise BudgetFormError(f"the budget '{text}' is more than any memory; {_HELP}")
    if not is_share:
        return Budget(size_bytes=int(size * (unit_size or 1)))
    if size > 1 and not unit:
        raise BudgetFormError(f"the budget '{text}' is more than everything; {_HELP}")
    return Budget(share=size)


def parse_extra_time(given: str | float) -> Fraction:
    """A share of the time without recomputation, from text such as `10%` or `.1`, or a number.

    Raises:
        BudgetFormError: it is none, or below 0.
    """
    text = str(given)
    found = _FORM.fullmatch(text)
    if isinstance(given, bool) or found is None or found[2] not in ("", "%"):
        raise BudgetFormError(f"the extra time '{text}' is no share; write 10% or .1")
    return Fraction(Decimal(found[1])) / (100 if found[2] else 1)


def budget_asked(
    budget: str | float | None, extra_time: str | float | None, unit_size: int | None = None
) -> Budget | None:
    """The budget of both options together, as `parse_budget` reads it; none for neither.

    Raises:
        BudgetFormError: one is not well written, or there is a limit on memory and one on time.
    """
    wanted = None if budget is None else parse_budget(budget, unit_size)
    if extra_time is None:
        return wanted
    if wanted is not None and not wanted.is_least:
        raise BudgetFormError(
            "--budget limits memory and --extra-time limits time; give one, the other is made small"
        )
    return Budget(most_extra=parse_extra_time(extra_time))
