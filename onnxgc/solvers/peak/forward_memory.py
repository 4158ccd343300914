"""Memory of the first forward between two cuts of an order (`onnxgc.solvers.peak.phase_memory`)."""

from collections.abc import Sequence, Set

import numpy as np

from onnxgc.solvers.peak.step_model import IntArray, StepModel, allocated


class FirstForward:
    """Memory of the first forward of phases that end at one of `cuts`, without the tensors kept for lower phases."""

    def __init__(self, model: StepModel, longest: int, cuts: Set[int]) -> None:
        self._model = model
        self._needs = self._all_needs(longest, cuts)
        self._late = self._late_storages()

    def needs(self, cut: int, width: int) -> tuple[IntArray, IntArray]:
        """Memory of the `width` phases that end at a cut; entry k has the lower cut `cut - 1 - k`.

        Waiting storages of the lower cut are excluded. The second array bounds the error of the first: bytes
        of tensors after their last reader in forward that the cut keeps for backward.
        """
        late = np.zeros(width, np.int64)
        for position in range(cut, cut - width, -1):
            if position in self._late and self._model.crosses(position, cut):
                late[cut - position] = sum(size for size, last in self._late[position] if last <= cut)
        return self._needs[cut][:width], np.cumsum(late)

    def need(self, lower: int, cut: int, waiting: frozenset[int], used: Sequence[int], backward_need: int) -> int:
        """Memory of one phase, including waiting storages of its lower cut; exact above `backward_need`."""
        storages = self._model.storages
        live_bytes = sum(storages[s].size for s in waiting)
        needs, late = self.needs(cut, cut - lower)
        upper_bound = int(needs[-1] + late[-1]) + live_bytes
        if upper_bound <= backward_need:
            return upper_bound
        # Storages that are never used again end with their last reader in forward.
        idle = [s for s in waiting if s not in used and not self._model.is_wanted_after(s, cut)]
        if not idle and not late[-1]:
            return upper_bound
        live_bytes -= sum(storages[s].size for s in idle)
        return live_bytes + self._exact_need(lower, cut, idle)

    def _late_storages(self) -> dict[int, list[tuple[int, int]]]:
        """By position: size and last forward reader of storages that backward reads after that reader."""
        model = self._model
        late: dict[int, list[tuple[int, int]]] = {}
        for storage in model.storages:
            last = model.operators[storage.readers[-1]].position if storage.readers else -1
            counted = model.operators[storage.producer].once and storage.readers
            if storage.slots and last < model.last_reader[storage.position] and not counted:
                late.setdefault(storage.position, []).append((storage.size, last))
        return late

    def _all_needs(self, longest: int, cuts: Set[int]) -> dict[int, IntArray]:
        model = self._model
        needs: dict[int, IntArray] = {}
        live: dict[int, int] = {}  # Live storages, and their positions.
        before = np.zeros(0, np.int64)
        for position in range(model.positions):
            width = min(position + 1, longest)
            need = np.zeros(width, np.int64)
            need[1:] = before[: width - 1]
            for index in model.operators_of[position]:
                operator = model.operators[index]
                for number in allocated(operator, model.storages):
                    live[number] = model.storages[number].position
                # Entry k counts the storages made after the cut position - 1 - k.
                made = np.zeros(width, np.int64)
                for number, where in live.items():
                    if where > position - width:
                        made[position - where] += model.storages[number].size
                live_bytes = np.cumsum(made) + model.forward_base[index]
                reused = operator.reuses
                if reused is not None and model.storages[reused].readers[-1] == index:
                    live_bytes[position - model.storages[reused].position :] -= model.storages[reused].size
                need = np.maximum(need, live_bytes)
                for number in (*operator.reads, *operator.writes):
                    if number in live and self._ends_in_forward(number, index):
                        del live[number]
            if position in cuts:
                needs[position] = need
            before = need
        return needs

    def _exact_need(self, lower: int, cut: int, idle: Sequence[int]) -> int:
        """Exact memory, operator by operator; `idle` storages are live until their last reader."""
        model = self._model
        live = {s: model.storages[s].size for s in idle}
        need = 0
        for position in range(lower + 1, cut + 1):
            for index in model.operators_of[position]:
                operator = model.operators[index]
                written = allocated(operator, model.storages, for_backward=model.crosses(position, cut))
                live.update((s, model.storages[s].size) for s in written)
                live_bytes = sum(live.values()) + model.forward_base[index]
                reused = operator.reuses
                if reused in live and self._ends(reused, index, cut):
                    live_bytes -= live[reused]
                need = max(need, live_bytes)
                for number in (*operator.reads, *operator.writes):
                    if self._ends(number, index, cut):
                        live.pop(number, None)
        return need

    def _ends(self, number: int, index: int, cut: int) -> bool:
        """Whether a storage ends with an operator that reads or writes it, under the cut of the phase."""
        storage = self._model.storages[number]
        kept = storage.slots and self._model.crosses(storage.position, cut)
        return not kept and self._ends_in_forward(number, index)

    def _ends_in_forward(self, number: int, index: int) -> bool:
        """Whether a storage that no cut keeps ends with an operator that reads or writes it."""
        storage = self._model.storages[number]
        if self._model.operators[storage.producer].once and storage.slots:
            return False
        return not storage.readers or storage.readers[-1] == index
