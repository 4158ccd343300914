"""Local search over sets of kept vertices in one order: keep or discard one vertex at a time."""

import time
from collections.abc import Iterable, Sequence

from onnxgc.solvers.peak.step_model import StepModel, allocated


def peak_of_kept(model: StepModel, kept: Iterable[int]) -> int:
    """Simulated peak in bytes of the step that keeps the vertices at the given positions.

    Every other tensor is recomputed right before its first reader in backward. O(operators + slots).
    """
    kept_positions = set(kept)
    storages, operators = model.storages, model.operators
    stays = [stored.position in kept_positions or operators[stored.producer].once for stored in storages]
    events = _events(model, stays)
    last_use: dict[int, int] = {}
    for at, (index, slot) in enumerate(events):
        for number in operators[index].reads if slot is None else model.slots[slot].reads:
            last_use[number] = at
    ends: dict[int, list[int]] = {}
    for number, at in last_use.items():
        ends.setdefault(at, []).append(number)
    peak = _first_forward(model, [stay and number in last_use for number, stay in enumerate(stays)])
    live_bytes = sum(storages[number].size for number in last_use if stays[number])
    start_bytes = 0
    next_slots = [slot for _, slot in events if slot is not None]
    passed = 0
    for at, (index, slot) in enumerate(events):
        if slot is not None:
            passed += 1
            peak = max(peak, live_bytes + model.slots[slot].peak_bytes)
        else:
            start_bytes = model.slots[next_slots[passed]].start_bytes
            operator = operators[index]
            written = operator.allocated(last_use.__contains__)
            live_bytes += sum(storages[number].size for number in written if number in last_use)
            idle = sum(storages[number].size for number in written if number not in last_use)
            reused = operator.reuses
            saved = storages[reused].size if reused is not None and last_use.get(reused) == at else 0
            peak = max(peak, live_bytes + idle - saved + start_bytes + operator.workspace_bytes)
        live_bytes -= sum(storages[number].size for number in ends.get(at, ()))
    return peak


def _events(model: StepModel, stays: list[bool]) -> list[tuple[int, int | None]]:
    """Recomputed operators (without slot) and slots, in order of time: (operator, slot)."""
    operators = model.operators
    there = list(stays)
    events: list[tuple[int, int | None]] = []
    for number, slot in enumerate(model.slots):
        missing = [storage for storage in slot.reads if not there[storage]]
        again: set[int] = set()
        while missing:
            index = model.storages[missing.pop()].producer
            if index not in again:
                again.add(index)
                missing.extend(storage for storage in operators[index].reads if not there[storage])
        for index in sorted(again):
            events.append((index, None))
            for storage in operators[index].writes:
                there[storage] = True
        events.append((0, number))
    return events


def _first_forward(model: StepModel, needed: list[bool]) -> int:
    """Peak of the first forward; `needed` storages stay live for backward."""
    storages = model.storages
    live: set[int] = set()
    live_bytes = peak = 0
    for index, operator in enumerate(model.operators):
        written = allocated(operator, storages, for_backward=any(needed[w] for w in operator.writes))
        live.update(written)
        live_bytes += sum(storages[number].size for number in written)
        reused = operator.reuses
        saved = 0
        if reused in live and not needed[reused] and storages[reused].readers[-1] == index:
            saved = storages[reused].size
        peak = max(peak, live_bytes - saved + model.forward_base[index])
        for number in dict.fromkeys((*operator.reads, *operator.writes)):
            readers = storages[number].readers
            if number in live and not needed[number] and (not readers or readers[-1] == index):
                live.remove(number)
                live_bytes -= storages[number].size
    return peak


def descend_peak(
    model: StepModel, kept: Iterable[int], max_events: int, deadline: float, changeable: Sequence[int] | None = None
) -> tuple[int, list[int]]:
    """Keep or discard vertices one by one while the peak falls; returns the peak and the kept positions.

    Each candidate costs O(operators + slots).

    Args:
        model: the step in one order.
        kept: positions of the vertices kept at first.
        max_events: limit on the operators and slots evaluated.
        deadline: end of the search on the clock of `time.perf_counter`.
        changeable: positions of the vertices that may change; `None` for all.
    """
    positions = range(model.positions) if changeable is None else changeable
    best = set(kept)
    peak = peak_of_kept(model, best)
    cost = len(model.operators) + len(model.slots)
    tries = max_events // cost
    since_improved = 0
    number = 0
    while since_improved < len(positions) and tries > 0 and time.perf_counter() < deadline:
        tries -= 1
        candidate = best ^ {positions[number]}
        value = peak_of_kept(model, candidate)
        since_improved += 1
        if value < peak:
            best, peak, since_improved = candidate, value, 0
        number = (number + 1) % len(positions)
    return peak, sorted(best)
