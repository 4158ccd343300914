"""Exact memory of backward between two cuts of a forward order.

Vertices are computed in a fixed order. A *cut* after place c keeps every tensor that is made at or
before c and read after it. Backward runs through the *phases* between neighbouring cuts from the last
to the first: in the phase (b, d] it computes again, each right before its first reader, the tensors
made after b and up to d that cut d does not keep.

What a phase needs above the tensors kept for the phases below it depends on b and d alone, up to
the tensors of cut b that no phase below uses (`Waiting`): these go as soon as this phase has
used them. So the peak of a whole plan is the largest, over its phases, of the bytes kept below
and the phase's own need.

`onnxgc.solvers.peak.step_model` says what is held beside these tensors. All sizes are in bytes, places are
counted from 0, and the cut before the first place is -1.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from onnxgc.solvers.peak.forward_memory import FirstForward
from onnxgc.solvers.peak.phase_events import EventWriter, PhaseEvents
from onnxgc.solvers.peak.step_model import IntArray, StepModel

Waiting: TypeAlias = frozenset[int]
"""Storages kept by a cut that no phase below it uses."""

LONGEST_PHASE = 1024
"""Places of the longest phase that is looked at."""
_PATIENCE = 24
"""A row of phases ends where so many in a row need too much."""
_LEAST = np.iinfo(np.int64).min // 4


@dataclass(frozen=True, slots=True)
class _WaitingUses:
    """What a row of phases does with the storages that usually wait at their lower cuts.

    By phase: the bytes of those used, the number that go on waiting, and whether one is dropped in
    forward. `held` says of rows start..stop that so many bytes are held up to an event.
    """

    used_bytes: IntArray
    still: IntArray
    idle: np.ndarray[Any, np.dtype[np.bool_]]
    held: list[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """The phases that end at one cut: entry k is for the lower cut `cut - 1 - k`.

    `need` is what a phase needs beside what is kept for the phases below it, `adds` what it adds to
    that for the phases above, if the lower cut has its usual waiting storages; `flops` is what it
    computes again. Where `regular`, the usual storages wait at the upper cut too.
    """

    need: IntArray
    adds: IntArray
    flops: IntArray
    regular: np.ndarray[Any, np.dtype[np.bool_]]


class PhaseCosts:
    """Needs of phases in one order of vertices, worked out when they are asked for."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self._sequences: dict[int, PhaseEvents] = {}
        self._rows: dict[int, PhaseRow] = {}
        self._last: tuple[IntArray, PhaseEvents] | None = None
        self._usual: dict[int, Waiting] = {-1: frozenset()}
        self._latest_usual = -1
        self._waiting_bytes = np.zeros(model.places + 1, np.int64)
        self._waits: dict[int, tuple[int, int]] = {}
        self._guess = _PATIENCE
        self._events = EventWriter(model)
        self._forward = FirstForward(model, LONGEST_PHASE)
        self._memo: dict[tuple[int, int, Waiting], tuple[int, int]] = {}

    def usual_waiting(self, cut: int) -> Waiting:
        """The waiting storages of a cut if its phase is long; none where its row is not there."""
        return self._usual.get(cut, frozenset())

    def row(self, cut: int, limit: int, kept: IntArray) -> PhaseRow:
        """The phases that end at a cut, at least as far as they may stay within `limit` bytes.

        Entry c + 1 of `kept` is what is kept below cut c at least. Rows of lower cuts that count must
        have been asked for.
        """
        depth = min(cut + 1, LONGEST_PHASE)
        found = self._rows.get(cut)
        while found is None or (len(found.need) < depth and not self._ends(cut, found, limit, kept)):
            width = len(found.need) if found is not None else 0
            guess = self._guess + 4
            found = self._compute_row(cut, cut - min(depth, guess if guess > width else width + width // 2))
            self._rows[cut] = found
        total = kept[cut + 1 - len(found.need) : cut + 1][::-1] + found.need
        self._guess = max(_PATIENCE, int(np.flatnonzero(total <= limit).max(initial=0)) + _PATIENCE)
        return found

    def _ends(self, cut: int, row: PhaseRow, limit: int, kept: IntArray) -> bool:
        """Whether the longest phases of a row are all too large."""
        width = len(row.need)
        below = kept[cut + 1 - width : cut + 1 - max(width - _PATIENCE, 0)][::-1]
        return bool(np.all(below + row.need[-_PATIENCE:] > limit))

    def last_row(self, limit: int) -> IntArray:
        """What the last phase needs, that stores everything, with the usual waiting storages.

        Entry k is for the lower cut `places - 2 - k`.
        """
        depth = self.model.places
        width = 64 if self._last is None else len(self._last[0])
        while True:
            width = min(width, depth)
            if self._last is None or len(self._last[0]) < width:
                sequence = self._events.of_the_last_phase(depth - width)
                uses = self._uses_of_waiting(sequence, depth - 1, width)
                self._last = self._needs(sequence, depth - 1, width, uses), sequence
            if width == depth or int(self._last[0][-1]) > limit:
                return self._last[0]
            width *= 2

    def phase(self, lower: int, cut: int, waiting: Waiting) -> tuple[int, int]:
        """Need of one phase, and what it adds to the bytes kept for the phases above."""
        key = (lower, cut, waiting)
        if key not in self._memo:
            self._memo[key] = self._phase(lower, cut, waiting)
        return self._memo[key]

    def last_phase(self, lower: int, waiting: Waiting) -> int:
        """Need of the phase from a cut to the end, which stores everything."""
        assert self._last is not None
        return self._need(self._last[1], lower, self.model.places - 1, waiting)

    # -- one phase ----------------------------------------------------------------------------

    def _phase(self, lower: int, cut: int, waiting: Waiting) -> tuple[int, int]:
        model, sequence = self.model, self._sequences[cut]
        used = [s for s in waiting if self._last_use(sequence, s, lower, cut) is not None]
        need = self._need(sequence, lower, cut, waiting)
        need = max(need, self._forward.need(lower, cut, waiting, used, need))
        kept = [s for s in sequence.kept_used if model.storages[s].place > lower]
        return need, sum(model.storages[s].size for s in (*used, *kept))

    def waiting_after(self, lower: int, cut: int, waiting: Waiting) -> Waiting:
        """What waits at the upper cut of a phase."""
        model, sequence = self.model, self._sequences[cut]
        still = (
            s
            for s in waiting
            if model.is_wanted_after(s, cut) and self._last_use(sequence, s, lower, cut) is None
        )
        new = (s for s in sequence.kept_unused if model.storages[s].place > lower)
        return frozenset((*still, *new))

    def _need(self, sequence: PhaseEvents, lower: int, cut: int, waiting: Waiting) -> int:
        size = len(sequence.base)
        change = np.zeros(size + 1, np.int64)
        inside = sequence.held_place > lower
        np.add.at(change, sequence.begin[inside], sequence.held_size[inside])
        np.add.at(change, sequence.end[inside] + 1, -sequence.held_size[inside])
        for storage in waiting:
            last = self._last_use(sequence, storage, lower, cut)
            if last is not None:
                change[0] += self.model.storages[storage].size
                change[last + 1] -= self.model.storages[storage].size
        held = np.cumsum(change)[:size] + sequence.base
        active = held[sequence.event_place > lower]
        return int(active.max(initial=0))

    def _last_use(self, sequence: PhaseEvents, number: int, lower: int, cut: int) -> int | None:
        """The last event of the phase (lower, cut] that holds a storage of the lower cut."""
        model = self.model
        storage = model.storages[number]
        last = None
        index = bisect_left(storage.slots, model.first_slot[lower + 1]) - 1
        if index >= 0 and storage.slots[index] >= sequence.first_slot:
            last = sequence.slot_at[storage.slots[index]]
        for reader in reversed(storage.readers):
            operator = model.operators[reader]
            if operator.place <= lower:
                break
            at = sequence.operator_at.get(reader)
            if at is not None and operator.place <= cut and (last is None or at > last):
                last = at - 1 if operator.reuses == number else at
        return last

    # -- rows of phases -----------------------------------------------------------------------

    def _compute_row(self, cut: int, lowest_cut: int) -> PhaseRow:
        model = self.model
        sequence = self._events.of_phases(cut, lowest_cut + 1)
        self._sequences[cut] = sequence
        if cut not in self._usual:
            self._set_usual(cut, sequence)
        width = cut - lowest_cut
        adds = np.zeros(width, np.int64)
        for storage in sequence.kept_used:
            adds[cut - model.storages[storage].place] += model.storages[storage].size
        adds = np.cumsum(adds)
        uses = self._uses_of_waiting(sequence, cut, width)
        adds += uses.used_bytes
        need = self._needs(sequence, cut, width, uses)
        lower_cuts = cut - 1 - np.arange(width)
        forward, late = self._forward.needs(cut, width)
        forward = forward + late + self._waiting_bytes[lower_cuts + 1]
        for k in np.flatnonzero((uses.idle | (late > 0)) & (forward > need)):
            lower = cut - 1 - int(k)
            waiting = self.usual_waiting(lower)
            used = [s for s in waiting if self._last_use(sequence, s, lower, cut) is not None]
            forward[k] = self._forward.need(lower, cut, waiting, used, int(need[k]))
        flops = np.zeros(width, np.int64)
        for index in sequence.operator_at:
            flops[cut - model.operators[index].place] += model.operators[index].flops
        # What waits as usual was made after the lower cut, or waits there already.
        places = np.sort(np.asarray([model.storages[s].place for s in self._usual[cut]], np.int64))
        regular = np.searchsorted(places, lower_cuts, side="right") == uses.still
        return PhaseRow(np.maximum(need, forward), adds, np.cumsum(flops), regular)

    def _set_usual(self, cut: int, sequence: PhaseEvents) -> None:
        # What was made before the sequence begins is known from the cut before.
        before = self._latest_usual
        older = self.waiting_after(before, cut, self._usual[before])
        storages = self.model.storages
        waiting = frozenset(sequence.kept_unused).union(
            s for s in older if storages[s].place < sequence.lowest
        )
        self._usual[cut] = waiting
        self._latest_usual = cut
        self._waiting_bytes[cut + 1] = sum(self.model.storages[s].size for s in waiting)
        for storage in waiting:
            first, _ = self._waits.get(storage, (cut, cut))
            self._waits[storage] = first, cut

    def _uses_of_waiting(self, sequence: PhaseEvents, cut: int, width: int) -> _WaitingUses:
        """How the phases from the `width` cuts below `cut` use what usually waits there."""
        model = self.model
        lowest_cut = cut - width
        used_bytes = np.zeros(width, np.int64)
        still = np.zeros(width, np.int64)
        idle = np.zeros(width, np.bool_)
        held: list[tuple[int, int, int, int]] = []
        first_cut = next((c for c in range(lowest_cut, cut) if c in self._usual), cut)
        made_above = (s for place in range(max(lowest_cut + 1, 0), cut) for s in model.storages_of[place])
        for number in dict.fromkeys((*self.usual_waiting(first_cut), *made_above)):
            if number not in self._waits:
                continue
            first, last = self._waits[number]
            first, last = max(first, lowest_cut), min(last, cut - 1)
            storage = model.storages[number]
            index = len(storage.slots) - 1
            by_slot = None
            if index >= 0 and storage.slots[index] >= sequence.first_slot:
                by_slot = sequence.slot_at[storage.slots[index]]
            # From the highest cut down, ever more readers are in the phase.
            lower = last
            at = by_slot
            readers = [r for r in reversed(storage.readers) if model.operators[r].place <= cut]
            position = 0
            while lower >= first:
                while position < len(readers) and model.operators[readers[position]].place > lower:
                    seen = sequence.operator_at.get(readers[position])
                    if seen is not None and (at is None or seen > at):
                        at = seen - 1 if model.operators[readers[position]].reuses == number else seen
                    position += 1
                stop = max(
                    first, model.operators[readers[position]].place if position < len(readers) else first
                )
                rows = slice(cut - 1 - lower, cut - stop)
                if at is not None:
                    used_bytes[rows] += storage.size
                    held.append((rows.start, rows.stop, at, storage.size))
                elif model.is_wanted_after(number, cut):
                    still[rows] += 1
                else:
                    idle[rows] = True
                lower = stop - 1
        return _WaitingUses(used_bytes, still, idle, held)

    def _needs(self, sequence: PhaseEvents, cut: int, width: int, uses: _WaitingUses) -> IntArray:
        """Needs of backward in the phases from the `width` cuts below `cut`, all at once."""
        size = len(sequence.base)
        change = np.zeros((width, size + 1), np.int64)
        row = cut - sequence.held_place
        np.add.at(change, (row, sequence.begin), sequence.held_size)
        np.add.at(change, (row, sequence.end + 1), -sequence.held_size)
        np.cumsum(change, axis=0, out=change)
        for start, stop, last, held_bytes in uses.held:
            change[start:stop, 0] += held_bytes
            change[start:stop, last + 1] -= held_bytes
        held = np.cumsum(change, axis=1, out=change)[:, :size]
        held += sequence.base
        lower_cuts = cut - 1 - np.arange(width)
        held[sequence.event_place[None, :] <= lower_cuts[:, None]] = _LEAST
        needs: IntArray = np.maximum(held.max(axis=1, initial=0), 0)
        return needs
