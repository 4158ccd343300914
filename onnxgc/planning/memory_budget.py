"""Memory budgets as users write them: `8GiB`, `500MB`, `60%`, `min`."""

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
_INT64_END = 2**63
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*|%)\s*", re.IGNORECASE)
_REMEDY = "write 8GiB, 500MB, 60% (of the peak without recomputation) or min"


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget in bytes, as a share of the baseline's peak, or (neither) the least possible.

    `max_extra` limits the extra time of the least budget, as a share of the time of every operator once.
    Shares are exact: 57% of 100 is 57. `reserved_bytes` are in use besides the step, and part of the budget.
    """

    size_bytes: int | None = None
    share: Fraction | None = None
    max_extra: Fraction | None = None
    reserved_bytes: int = 0

    @property
    def is_least(self) -> bool:
        return self.size_bytes is None and self.share is None

    def bytes_of(self, regular_peak_bytes: int) -> int:
        """Bytes available to a step, given the baseline's peak. Not valid if `is_least`.

        Raises:
            BudgetError: nothing is left.
        """
        assert not self.is_least
        whole = self.size_bytes
        if whole is None:
            whole = int((self.share or 0) * (regular_peak_bytes + self.reserved_bytes))
        if self.reserved_bytes and whole <= self.reserved_bytes:
            raise BudgetError(
                f"no plan fits {whole:,} bytes: the optimizer's state alone takes {self.reserved_bytes:,}; "
                "give more memory, another optimizer, or freeze a part"
            )
        return whole - self.reserved_bytes


def parse_budget(given: str | float, unit_size: int | None = None) -> Budget:
    """A budget from text or a number: an int is bytes, a float of at most 1 a share.

    Text without a unit follows the same rule: `.8` is a share, `8000000` is bytes. With a `unit_size` a
    number above 1 is a size in that unit, also a fraction: `4.5`.

    >>> parse_budget("60%").share
    Fraction(3, 5)
    >>> parse_budget("1.5GiB").size_bytes
    1610612736

    Raises:
        BudgetFormError: it has another form, or is not above 0.
    """
    if isinstance(given, bool) or not isinstance(given, str | Real):
        raise BudgetFormError(f"{given!r} is not a valid memory size; {_REMEDY}")
    # Numbers of numpy are written as Python's.
    number: Any = given
    is_whole = hasattr(number, "__index__")
    text = number if isinstance(number, str) else str(int(number) if is_whole else float(number))
    if text.strip().lower() == "min":
        return Budget()
    match = _FORM.fullmatch(text)
    if match is None or (match[2].lower() not in _UNITS and match[2] != "%"):
        raise BudgetFormError(f"'{text}' is not a valid memory size; {_REMEDY}")
    amount, unit = Fraction(Decimal(match[1])), match[2].lower()
    is_share = unit == "%" or (not unit and "." in match[1] and (unit_size is None or amount <= 1))
    size = amount / 100 if unit == "%" else amount * _UNITS[unit]
    if size <= 0 or (size < 1 and not is_share):
        raise BudgetFormError(f"the budget '{text}' is less than one byte; {_REMEDY}")
    if size >= _INT64_END:
        raise BudgetFormError(f"the budget '{text}' exceeds 64 bits; {_REMEDY}")
    if not is_share:
        return Budget(size_bytes=int(size * (unit_size or 1)))
    if size > 1 and not unit:
        raise BudgetFormError(f"the share '{text}' is above 1; {_REMEDY}")
    return Budget(share=size)


def parse_extra_time(given: str | float) -> Fraction:
    """A share of the time without recomputation, from text such as `10%` or `.1`, or a number.

    >>> parse_extra_time("10%")
    Fraction(1, 10)

    Raises:
        BudgetFormError: it has another form, or is below 0.
    """
    text = str(given)
    match = _FORM.fullmatch(text)
    if isinstance(given, bool) or match is None or match[2] not in ("", "%"):
        raise BudgetFormError(f"the extra time '{text}' is not a valid share; write 10% or .1")
    return Fraction(Decimal(match[1])) / (100 if match[2] else 1)


def parse_budget_options(
    budget: str | float | None, extra_time: str | float | None, unit_size: int | None = None
) -> Budget | None:
    """The budget of the options `--budget` and `--extra-time` together; `None` for neither.

    Raises:
        BudgetFormError: one has an invalid form, or both memory and time are limited.
    """
    wanted = None if budget is None else parse_budget(budget, unit_size)
    if extra_time is None:
        return wanted
    if wanted is not None and not wanted.is_least:
        raise BudgetFormError(
            "--budget limits memory and --extra-time limits time; give one, and the other is minimised"
        )
    return Budget(max_extra=parse_extra_time(extra_time))
