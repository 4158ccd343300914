"""A sequence of operators for the same network with other shapes, or in the forms of another provider.

Operators of forward have the same names in both steps. Gradients may be computed in other parts, so that some
operators of backward exist in one step only.
"""

from collections.abc import Iterator, Mapping, Sequence

from onnxgc.planning.schedule import StepGraph
from onnxgc.planning.schedule_from_sequence import StepOperators


def transferred_sequence(names: Sequence[str], step: StepGraph) -> tuple[str, ...] | None:
    """The sequence with the operators of `step`, or None if its forward part is that of another network.

    Unknown operators are left out. Each missing one runs once: after its predecessor in the step, or where
    its inputs are there.
    """
    return _Transfer(names, step).sequence()


class _Transfer:
    def __init__(self, names: Sequence[str], step: StepGraph) -> None:
        self._step = step
        self._operators = StepOperators.from_step(step).operators
        self._added: dict[int, list[str]] = {}
        """By place: operators that run right after it."""
        self._unknown = [name for name in names if name not in self._operators and "/update/" not in name]
        self._known = [name for name in names if name in self._operators]
        self._place: dict[str, int] = {}
        """By operator: the number of the run in `_known` after which it has run."""
        for place, name in enumerate(self._known):
            self._place.setdefault(name, place)

    def sequence(self) -> tuple[str, ...] | None:
        if any(self._is_missing(name) for name, entry in self._operators.items() if entry.chunk is None):
            return None
        if any("grad" not in name and "loss" not in name for name in self._unknown):
            # Operators of forward are left out of the loss only, where a mean of one sample is none.
            return None
        producers = self._producers()
        self._forget_changed(producers)
        readers = self._first_readers(producers)
        previous = ""
        for name in self._operators:
            if self._is_missing(name):
                place = max((self._place[other] for other in producers[name]), default=-1)
                end = readers.get(name, len(self._known))
                if place >= end:
                    return None
                if previous and self._place[previous] < end:
                    place = max(place, self._place[previous])
                self._place[name] = place
                self._added.setdefault(place, []).append(name)
            previous = name
        return tuple(self._merged())

    def _is_missing(self, name: str) -> bool:
        return name not in self._place

    def _forget_changed(self, producers: Mapping[str, Sequence[str]]) -> None:
        """Operators of backward that read tensors which are not there yet are placed anew."""
        late: set[str] = set()
        for name in self._operators:
            place = self._place.get(name)
            if place is not None and any(
                other in late or self._place.get(other, -1) > place for other in producers[name]
            ):
                late.add(name)
        for name in late:
            del self._place[name]

    def _merged(self) -> Iterator[str]:
        placed_anew = {name for names in self._added.values() for name in names}
        yield from self._added.get(-1, ())
        for place, name in enumerate(self._known):
            if name not in placed_anew:
                yield name
            yield from self._added.get(place, ())

    def _producers(self) -> dict[str, tuple[str, ...]]:
        """By operator: those that write what it reads, also through views."""
        writers: dict[str, tuple[str, ...]] = {}
        found: dict[str, tuple[str, ...]] = {}
        for operator in self._step.operators:
            read = tuple(writer for name in operator.inputs for writer in writers.get(name, ()))
            found[operator.name] = read
            is_run = operator.name in self._operators
            writers.update(dict.fromkeys(operator.outputs, (operator.name,) if is_run else read))
        return found

    def _first_readers(self, producers: Mapping[str, Sequence[str]]) -> dict[str, int]:
        """By missing operator: the number of the first run that reads it."""
        first: dict[str, int] = {}
        for name, writers in producers.items():
            if not self._is_missing(name):
                for writer in writers:
                    if self._is_missing(writer):
                        first[writer] = min(first.get(writer, len(self._known)), self._place[name])
        return first
