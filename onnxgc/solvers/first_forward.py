"""Memory of the first forward between two cuts of an order (`onnxgc.solvers.phases`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgc.solvers.step_model import IntArray, StepModel, allocated


class FirstForward:
    """What the first forward of the phases needs beside what is kept for the phases below them."""

    def __init__(self, model: StepModel, longest: int) -> None:
        self._model = model
        self._needs = self._all_needs(longest)

    def needs(self, cut: int) -> IntArray:
        """For the phases that end at a cut, entry k with the lower cut `cut - 1 - k`.

        Storages of the lower cut that do not count as kept below are left out.
        """
        return self._needs[cut]

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

    def need(
        self, lower: int, cut: int, waiting: frozenset[int], used: Sequence[int], backward_need: int
    ) -> int:
        """For one phase, with what waits at its lower cut; exact above `backward_need`."""
        storages = self._model.storages
        held = sum(storages[s].size for s in waiting)
        at_most = int(self._needs[cut][cut - 1 - lower]) + held
        if at_most <= backward_need:
            return at_most
        # What nothing will ever use ends with its last reader in forward.
        idle = [s for s in waiting if s not in used and not self._model.crosses(storages[s].place, cut)]
        if not idle:
            return at_most
        held -= sum(storages[s].size for s in idle)
        return held + self._need_with_idle(lower, cut, idle)

    def _need_with_idle(self, lower: int, cut: int, idle: Sequence[int]) -> int:
        model = self._model
        alive = {s: model.storages[s].size for s in idle}
        need = 0
        for place in range(lower + 1, cut + 1):
            for index in model.operators_of[place]:
                operator = model.operators[index]
                alive.update((s, model.storages[s].size) for s in allocated(operator, model.storages))
                held = sum(alive.values()) + model.forward_base[index]
                reused = operator.reuses
                if reused in alive and model.storages[reused].readers[-1] == index:
                    held -= alive[reused]
                need = max(need, held)
                for number in (*operator.reads, *operator.writes):
                    if self._ends_in_forward(number, index):
                        alive.pop(number, None)
        return need

    def _ends_in_forward(self, number: int, index: int) -> bool:
        """Whether a storage that no cut keeps ends with a forward operator that touches it."""
        storage = self._model.storages[number]
        if self._model.operators[storage.producer].once and storage.slots:
            return False
        return not storage.readers or storage.readers[-1] == index
