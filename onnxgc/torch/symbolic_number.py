"""A number whose value a trace does not depend on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from onnxgc.torch.module_state import ABSENT, KnownState, Place, RetraceNeeded


class SymbolicNumber:
    """Replaces a number that forward updates; records arithmetic, and ends a trace that reads the value."""

    __slots__ = ("_kind", "_known", "_steps", "place")

    def __init__(
        self, place: Place, kind: type, known: KnownState, *steps: tuple[Any, tuple[Any, ...]]
    ) -> None:
        self.place = place
        self._kind = kind
        self._known = known
        self._steps = steps

    def evaluate(self, number: float) -> Any:
        """The value of the recorded arithmetic for the initial value `number`."""
        for function, operands in self._steps:
            number = function(*(number if operand is ABSENT else operand for operand in operands))
        return number

    def _record(self, function: Callable[..., Any], *operands: Any) -> SymbolicNumber:
        """`ABSENT` marks this number among the operands."""
        if any(operand is not ABSENT and type(operand) not in (int, float) for operand in operands):
            self._inspect()
        return SymbolicNumber(self.place, self._kind, self._known, *self._steps, (function, operands))

    def _inspect(self, *_: Any) -> Any:
        self._known.inspected.add(self.place)
        raise RetraceNeeded

    def __add__(self, other: Any) -> SymbolicNumber:
        return self._record(operator.add, ABSENT, other)

    def __radd__(self, other: Any) -> SymbolicNumber:
        return self._record(operator.add, other, ABSENT)

    def __sub__(self, other: Any) -> SymbolicNumber:
        return self._record(operator.sub, ABSENT, other)

    def __rsub__(self, other: Any) -> SymbolicNumber:
        return self._record(operator.sub, other, ABSENT)

    def __mul__(self, other: Any) -> SymbolicNumber:
        return self._record(operator.mul, ABSENT, other)

    def __rmul__(self, other: Any) -> SymbolicNumber:
        return self._record(operator.mul, other, ABSENT)

    def __mod__(self, other: Any) -> SymbolicNumber:
        if other == 0:
            self._inspect()
        return self._record(operator.mod, ABSENT, other)

    def __deepcopy__(self, memo: Any) -> SymbolicNumber:
        memo.numbers.append(self)
        return self

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = (
        __ceil__
    ) = _inspect
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __str__ = __repr__ = __format__ = (
        _inspect
    )
    __neg__ = __pos__ = __abs__ = __invert__ = __pow__ = __rpow__ = __truediv__ = __rtruediv__ = _inspect
    __floordiv__ = __rfloordiv__ = __rmod__ = __divmod__ = __rdivmod__ = __and__ = __or__ = __xor__ = _inspect
    __lshift__ = __rshift__ = __len__ = __iter__ = __call__ = __getitem__ = __getattr__ = __reduce_ex__ = (
        _inspect
    )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type that `isinstance` sees; a guard accepts numbers of one type only."""
        return type(self.evaluate(self._kind(1)))
