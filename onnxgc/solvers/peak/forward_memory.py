"""Memory of the first forward between two cuts of an order (`onnxgc.solvers.peak.phase_memory`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgc.solvers.peak.step_model import IntArray, StepModel, allocated


class FirstForward:
    """What the first forward of the phases needs beside what is kept for the phases below them."""

    def __init__(self, model: StepModel, longest: int) -> None:
        self._model = model
        self._needs = self._all_needs(longest)
        self._late = self._late_storages()

    def needs(self, cut: int, width: int) -> tuple[IntArray, IntArray]:
        """For the `width` phases that end at a cut, entry k with the lower cut `cut - 1 - k`.

        What waits at the lower cut is left out. The second array is how far the first may be too low:
        bytes of tensors that forward has done with and that the cut keeps for backward.
        """
        late = np.zeros(width, np.int64)
        for place in range(cut, cut - width, -1):
            if place in self._late and self._model.crosses(place, cut):
                late[cut - place] = sum(size for size, last in self._late[place] if last <= cut)
        return self._needs[cut][:width], np.cumsum(late)

    def need(
        self, lower: int, cut: int, waiting: frozenset[int], used: Sequence[int], backward_need: int
    ) -> int:
        """For one phase, with what waits at its lower cut; exact above `backward_need`."""
        storages = self._model.storages
        held = sum(storages[s].size for s in waiting)
        needs, late = self.needs(cut, cut - lower)
        at_most = int(needs[-1] + late[-1]) + held
        if at_most <= backward_need:
            return at_most
        # What nothing will ever use ends with its last reader in forward.
        idle = [s for s in waiting if s not in used and not self._model.is_wanted_after(s, cut)]
        if not idle and not late[-1]:
            return at_most
        held -= sum(storages[s].size for s in idle)
        return held + self._exact_need(lower, cut, idle)

    def _late_storages(self) -> dict[int, list[tuple[int, int]]]:
        """By place: sizes of what backward reads after forward has done with it, and where that is."""
        model = self._model
        late: dict[int, list[tuple[int, int]]] = {}
        for storage in model.storages:
            last = model.operators[storage.readers[-1]].place if storage.readers else -1
            counted = model.operators[storage.producer].once and storage.readers
            if storage.slots and last < model.last_reader[storage.place] and not counted:
                late.setdefault(storage.place, []).append((storage.size, last))
        return late

    def _all_needs(self, longest: int) -> list[IntArray]:
        model = self._model
        needs: list[IntArray] = []
        alive: dict[int, int] = {}  # Storages in memory, and their places.
        before = np.zeros(0, np.int64)
        for place in range(model.places):
            width = min(place + 1, longest)
            need = np.zeros(width, np.int64)
            need[1:] = before[: width - 1]
            for index in model.operators_of[place]:
                operator = model.operators[index]
                for number in allocated(operator, model.storages):
                    alive[number] = model.storages[number].place
                # Entry k counts the storages made after the cut place - 1 - k.
                made = np.zeros(width, np.int64)
                for number, where in alive.items():
                    if where > place - width:
                        made[place - where] += model.storages[number].size
                held = np.cumsum(made) + model.forward_base[index]
                reused = operator.reuses
                if reused is not None and model.storages[reused].readers[-1] == index:
                    held[place - model.storages[reused].place :] -= model.storages[reused].size
                need = np.maximum(need, held)
                for number in (*operator.reads, *operator.writes):
                    if number in alive and self._ends_in_forward(number, index):
                        del alive[number]
            needs.append(need)
            before = need
        return needs

    def _exact_need(self, lower: int, cut: int, idle: Sequence[int]) -> int:
        """Operator by operator; `idle` is there at the beginning and ends with its last reader."""
        model = self._model
        alive = {s: model.storages[s].size for s in idle}
        need = 0
        for place in range(lower + 1, cut + 1):
            for index in model.operators_of[place]:
                operator = model.operators[index]
                written = allocated(operator, model.storages, for_backward=model.crosses(place, cut))
                alive.update((s, model.storages[s].size) for s in written)
                held = sum(alive.values()) + model.forward_base[index]
                reused = operator.reuses
                if reused in alive and self._ends(reused, index, cut):
                    held -= alive[reused]
                need = max(need, held)
                for number in (*operator.reads, *operator.writes):
                    if self._ends(number, index, cut):
                        alive.pop(number, None)
        return need

    def _ends(self, number: int, index: int, cut: int) -> bool:
        """Whether a storage ends with an operator that touches it, where a cut keeps what it keeps."""
        storage = self._model.storages[number]
        kept = storage.slots and self._model.crosses(storage.place, cut)
        return not kept and self._ends_in_forward(number, index)

    def _ends_in_forward(self, number: int, index: int) -> bool:
        """Whether a storage that no cut keeps ends with a forward operator that touches it."""
        storage = self._model.storages[number]
        if self._model.operators[storage.producer].once and storage.slots:
            return False
        return not storage.readers or storage.readers[-1] == index
