"""Inner loops on sequences, compiled by numba when they first run (kept on disk from then on).

A sequence lies in the first `length` places of an array. Its judge here is that of
`onnxgc.budget.operator_problem.simulate_sequence`, which tests hold it to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numba import njit

from onnxgc.budget.operator_problem import OperatorProblem

Array: TypeAlias = np.ndarray[Any, Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function as machine code, made when it first runs and kept on disk."""
    return cast(Function, njit(cache=True, nogil=True)(function))


class Tables(NamedTuple):
    """A problem as arrays; what operator `i` reads is `reads[first_read[i]:first_read[i + 1]]`."""

    first_read: Array
    reads: Array
    first_reader: Array
    readers: Array
    first_write: Array
    writes: Array
    sizes: Array
    producer: Array
    kept: Array
    durations: Array
    workspace: Array
    in_place: Array
    fewest: Array
    may_repeat: Array


def tables_of(problem: OperatorProblem) -> Tables:
    """The arrays of a problem, all of 64-bit integers."""
    operations = problem.operations

    def starts(lists: list[tuple[int, ...]]) -> Array:
        return np.concatenate(([0], np.cumsum([len(entry) for entry in lists]))).astype(np.int64)

    reads = [operation.reads for operation in operations]
    writes = [operation.writes for operation in operations]

    def flat(values: Any) -> Array:
        return np.asarray(list(values), np.int64)

    return Tables(
        starts(reads),
        flat(storage for entry in reads for storage in entry),
        starts(list(problem.readers)),
        flat(operator for entry in problem.readers for operator in entry),
        starts(writes),
        flat(storage for entry in writes for storage in entry),
        flat(problem.sizes),
        flat(problem.producer),
        flat(sorted(problem.kept)),
        flat(operation.duration for operation in operations),
        flat(operation.workspace for operation in operations),
        flat(-1 if operation.in_place is None else operation.in_place for operation in operations),
        flat(operation.fewest for operation in operations),
        flat(operation.may_repeat for operation in operations),
    )


class State(NamedTuple):
    """Room for a sequence and what evaluating it finds.

    By place: `memory` held there, `copy` the number of the first copy written there, `taken` the copy
    that its operator may work in. By copy: `until`, the place of its last reader; `born`, its own;
    `older`, the copy of the same storage before it. `current` is the latest copy by storage.
    """

    sequence: Array
    memory: Array
    copy: Array
    taken: Array
    until: Array
    born: Array
    older: Array
    current: Array


def state_for(tables: Tables, most: int) -> State:
    """Room for sequences of up to `most` runs."""
    widest = int(np.max(np.diff(tables.first_write), initial=1))

    def room(count: int) -> Array:
        return np.zeros(count, np.int64)

    copies = (most + 2) * widest
    return State(
        room(most + 3),
        room(most + 3),
        room(most + 3),
        room(most + 3),
        room(copies),
        room(copies),
        room(copies),
        np.full(len(tables.sizes), -1, np.int64),
    )


@compiled
def evaluate(tables: Tables, state: State, length: int, budget: int) -> tuple[int, float]:
    """Peak, and the sum over all places of what is held above the budget."""
    sequence, memory, copy, taken, until, born, older, current = state
    current[:] = -1
    count = 0
    for place in range(length):
        operator = sequence[place]
        for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
            until[current[tables.reads[k]]] = place
        taken[place] = current[tables.in_place[operator]] if tables.in_place[operator] >= 0 else -1
        memory[place] = 0
        copy[place] = count
        for k in range(tables.first_write[operator], tables.first_write[operator + 1]):
            older[count] = current[tables.writes[k]]
            current[tables.writes[k]] = count
            until[count] = place
            born[count] = place
            count += 1
    copy[length] = count
    memory[length] = 0
    memory[length + 1] = 0
    for storage in tables.kept:
        until[current[storage]] = length
    for place in range(length):
        operator = sequence[place]
        first = tables.first_write[operator]
        written = tables.first_write[operator + 1] - first
        while written > tables.fewest[operator] and until[copy[place] + written - 1] == place:
            written -= 1
        for k in range(written):
            size = tables.sizes[tables.writes[first + k]]
            memory[place] += size
            memory[until[copy[place] + k] + 1] -= size
    peak = 0
    overflow = 0.0
    held = 0
    for place in range(length):
        operator = sequence[place]
        held += memory[place]
        now = held + tables.workspace[operator]
        if taken[place] >= 0 and until[taken[place]] == place:
            now -= tables.sizes[tables.writes[tables.first_write[operator]]]
        memory[place] = now
        if now > peak:
            peak = now
        if now > budget:
            overflow += now - budget
    return peak, overflow


@compiled
def _reads(tables: Tables, operator: int, storage: int) -> bool:
    for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
        if tables.reads[k] == storage:
            return True
    return False


@compiled
def _next_use(tables: Tables, state: State, place: int, storage: int, until: int) -> int:
    """The first place behind `place` and up to `until` that reads a storage; `until` if it is the end."""
    for later in range(place + 1, until):
        if _reads(tables, state.sequence[later], storage):
            return later
    return until


@compiled
def _copy_before(state: State, storage: int, place: int) -> int:
    """The latest copy of a storage that is born before a place."""
    copy: int = state.current[storage]
    while copy >= 0 and state.born[copy] >= place:
        copy = state.older[copy]
    return copy


@compiled
def _chosen_again(
    tables: Tables, state: State, storage: int, place: int, depth: int, marks: Array, chosen: Array
) -> tuple[int, int]:
    """Operators to run before a place so that a storage is there, in order; their number and time.

    Inputs that are gone by then are computed again too, up to `depth` operators deep; others stay
    longer than they did. `marks` is all zero before and after. -1 where one must not run again.
    """
    start = tables.producer[storage]
    marks[start] = depth + 1
    lowest = start
    count = 0
    time = 0
    operator = start
    while operator >= lowest:
        if marks[operator] > 0:
            chosen[count] = operator
            count += 1
            time += tables.durations[operator]
            if marks[operator] > 1:
                for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
                    read = tables.reads[k]
                    producer = tables.producer[read]
                    if marks[producer] >= marks[operator] - 1 or not tables.may_repeat[producer]:
                        continue
                    if state.until[_copy_before(state, read, place)] < place:
                        marks[producer] = marks[operator] - 1
                        lowest = min(lowest, producer)
        operator -= 1
    for k in range(count):
        marks[chosen[k]] = 0
    chosen[:count] = chosen[:count][::-1].copy()
    if not tables.may_repeat[start]:
        return -1, 0
    return count, time


@compiled
def _with_inserted(source: Array, length: int, place: int, chosen: Array, count: int, target: Array) -> int:
    """Write the sequence with `count` chosen operators before a place into `target`; its length."""
    target[:place] = source[:place]
    target[place : place + count] = chosen[:count]
    target[place + count : length + count] = source[place:length]
    return length + count


@compiled
def seed(number: int) -> None:
    """Begin the row of drawn numbers anew."""
    np.random.seed(number)


@compiled
def repair(
    tables: Tables,
    state: State,
    other: State,
    length: int,
    budget: int,
    deepest: int,
    most_rounds: int,
    noise: float,
    most_time: int,
) -> tuple[int, float, int]:
    """Insert recomputation until the budget holds or nothing helps; new length, overflow left, and effort.

    In each round: for each storage in memory at the worst place and not used there, and each depth of
    recomputation, an estimate of the overflow removed for the time added; the best of them judged
    exactly, and the best taken. It gives up where more than `most_time` would be added.
    """
    added = 0
    rounds = 0
    work = 0
    most = len(state.sequence) - 3
    operators = len(tables.durations)
    marks = np.zeros(operators, np.int64)
    chosen = np.zeros(operators, np.int64)
    tried = 12
    best_score = np.zeros(tried)
    best_storage = np.zeros(tried, np.int64)
    best_place = np.zeros(tried, np.int64)
    best_depth = np.zeros(tried, np.int64)
    excess = np.zeros(most + 3)
    _, overflow = evaluate(tables, state, length, budget)
    while rounds < most_rounds and overflow > 0:
        rounds += 1
        work += 4 * length
        worst = 0
        for place in range(length):
            excess[place] = max(0, state.memory[place] - budget)
            if state.memory[place] > state.memory[worst]:
                worst = place
        best_score[:] = 0.0
        at_work = state.sequence[worst]
        for copy in range(state.copy[worst]):
            until = state.until[copy]
            if until <= worst:
                continue
            born = state.sequence[state.born[copy]]
            storage = tables.writes[tables.first_write[born] + copy - state.copy[state.born[copy]]]
            size = tables.sizes[storage]
            if size == 0 or not tables.may_repeat[born] or _reads(tables, at_work, storage):
                continue
            following = _next_use(tables, state, worst, storage, until)
            start = worst
            while start > state.born[copy] + 1 and not _reads(tables, state.sequence[start - 1], storage):
                start -= 1
            work += following - start + 8
            gain = 0.0
            for place in range(start, following):
                gain += min(excess[place], float(size))
            before = -1
            for depth in range(deepest + 1):
                count, time = _chosen_again(tables, state, storage, following, depth, marks, chosen)
                if count == before or count < 0:
                    break
                before = count
                work += 8 * count
                loss = 0.0
                for k in range(count):
                    for j in range(tables.first_read[chosen[k]], tables.first_read[chosen[k] + 1]):
                        read = tables.reads[j]
                        ends = state.until[_copy_before(state, read, following)]
                        if ends >= following or _is_among(tables.producer[read], chosen, count):
                            continue
                        work += following - ends
                        for place in range(ends + 1, following):
                            if excess[place] > 0:
                                loss += tables.sizes[read]
                score = (gain - loss) / (time + 1.0)
                if noise > 0:
                    score *= 1 + noise * (np.random.random() - 0.5)
                if score > best_score[tried - 1]:
                    k = tried - 1
                    while k > 0 and best_score[k - 1] < score:
                        best_score[k] = best_score[k - 1]
                        best_storage[k] = best_storage[k - 1]
                        best_place[k] = best_place[k - 1]
                        best_depth[k] = best_depth[k - 1]
                        k -= 1
                    best_score[k] = score
                    best_storage[k] = storage
                    best_place[k] = following
                    best_depth[k] = depth
        taken = -1
        taken_score = 0.0
        for k in range(tried):
            if best_score[k] <= taken_score:
                break
            count, time = _chosen_again(
                tables, state, best_storage[k], best_place[k], best_depth[k], marks, chosen
            )
            if length + count > most:
                continue
            longer = _with_inserted(state.sequence, length, best_place[k], chosen, count, other.sequence)
            work += 3 * length
            _, left = evaluate(tables, other, longer, budget)
            score = (overflow - left) / (time + 1.0)
            if score > taken_score:
                taken_score = score
                taken = k
        if taken < 0:
            break
        count, time = _chosen_again(
            tables, state, best_storage[taken], best_place[taken], best_depth[taken], marks, chosen
        )
        added += time
        if added > most_time:
            break
        longer = _with_inserted(state.sequence, length, best_place[taken], chosen, count, other.sequence)
        state.sequence[:longer] = other.sequence[:longer]
        length = longer
        _, overflow = evaluate(tables, state, length, budget)
    return length, overflow, work // (3 * length + 1)


@compiled
def run_on_demand(
    tables: Tables, state: State, order: Array, budget: int, by_size: float, by_distance: float
) -> int:
    """Run operators in an order, making room and computing again what is missing; the length, 0 for failure.

    What goes first is cheap to compute again, large, and not needed for long: `by_size` and
    `by_distance` say how much the latter two count, as exponents.
    """
    operators = len(tables.durations)
    most = len(state.sequence) - 3
    held = np.zeros(len(tables.sizes), np.bool_)
    present = np.zeros(len(tables.sizes), np.int64)
    there = 0
    is_kept = np.zeros(len(tables.sizes), np.bool_)
    is_kept[tables.kept] = True
    pins = np.zeros(len(tables.sizes), np.int64)
    uses = tables.first_reader.copy()
    place_of = np.zeros(operators, np.int64)
    place_of[order] = np.arange(operators)
    stack = np.zeros(operators + 1, np.int64)
    seen = np.zeros(operators, np.int64)
    ran = np.zeros(operators, np.bool_)
    chain = np.zeros(operators, np.int64)
    memory = 0
    length = 0
    mark = 0
    for now in range(operators + len(tables.kept)):
        if now < operators:
            target = order[now]
        elif held[tables.kept[now - operators]]:
            continue
        else:
            target = tables.producer[tables.kept[now - operators]]
        depth = 0
        stack[0] = target
        for k in range(tables.first_read[target], tables.first_read[target + 1]):
            pins[tables.reads[k]] += 1
        while depth >= 0:
            operator = stack[depth]
            missing = -1
            for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
                if not held[tables.reads[k]]:
                    missing = tables.producer[tables.reads[k]]
            if missing >= 0:
                if not tables.may_repeat[missing] or depth == operators:
                    return 0
                depth += 1
                stack[depth] = missing
                for k in range(tables.first_read[missing], tables.first_read[missing + 1]):
                    pins[tables.reads[k]] += 1
                continue
            needed = tables.workspace[operator]
            for k in range(tables.first_write[operator], tables.first_write[operator + 1]):
                if not held[tables.writes[k]]:
                    needed += tables.sizes[tables.writes[k]]
            while memory + needed > budget:
                worst = -1
                lowest = 0.0
                for number in range(there):
                    storage = present[number]
                    producer = tables.producer[storage]
                    if pins[storage] > 0 or tables.sizes[storage] == 0:
                        continue
                    while (
                        uses[storage] < tables.first_reader[storage + 1]
                        and ran[tables.readers[uses[storage]]]
                    ):
                        uses[storage] += 1
                    is_needed = is_kept[storage]
                    following = operators
                    for k in range(uses[storage], tables.first_reader[storage + 1]):
                        if not ran[tables.readers[k]]:
                            following = min(following, place_of[tables.readers[k]])
                            is_needed = True
                    if is_needed and not tables.may_repeat[producer]:
                        continue
                    time = 0.0
                    if is_needed:
                        # The time of its writer, and of what that would miss.
                        count = 1
                        chain[0] = producer
                        mark += 1
                        at = 0
                        while at < count and count < 50:
                            time += tables.durations[chain[at]]
                            for k in range(tables.first_read[chain[at]], tables.first_read[chain[at] + 1]):
                                before = tables.producer[tables.reads[k]]
                                if not held[tables.reads[k]] and seen[before] != mark:
                                    seen[before] = mark
                                    chain[count] = before
                                    count += 1
                            at += 1
                    distance = 1.0 + max(0, following - now)
                    score = (time + 1e-3) / (tables.sizes[storage] ** by_size * distance**by_distance)
                    if not is_needed:
                        score = -1.0 * tables.sizes[storage]
                    if worst < 0 or score < lowest:
                        worst = number
                        lowest = score
                if worst < 0:
                    return 0
                held[present[worst]] = False
                memory -= tables.sizes[present[worst]]
                there -= 1
                present[worst] = present[there]
            if length == most:
                return 0
            state.sequence[length] = operator
            length += 1
            ran[operator] = True
            for k in range(tables.first_write[operator], tables.first_write[operator + 1]):
                if not held[tables.writes[k]]:
                    held[tables.writes[k]] = True
                    present[there] = tables.writes[k]
                    there += 1
                    memory += tables.sizes[tables.writes[k]]
            for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
                pins[tables.reads[k]] -= 1
            depth -= 1
    return length


@compiled
def _is_among(operator: int, chosen: Array, count: int) -> bool:
    for k in range(count):
        if chosen[k] == operator:
            return True
    return False


@compiled
def _repeats(tables: Tables, state: State, length: int, seen: Array, places: Array) -> int:
    """Places of runs that are not their operator's first; their number."""
    seen[:] = 0
    count = 0
    for place in range(length):
        if seen[state.sequence[place]]:
            places[count] = place
            count += 1
        seen[state.sequence[place]] = 1
    return count


@compiled
def _is_needed(tables: Tables, state: State, place: int, budget: int) -> bool:
    """Whether memory would pass the budget without a run, as far as a glance at its first output tells.

    The copy before would have to stay until then. All that is won are inputs that end here.
    """
    operator = state.sequence[place]
    won = tables.workspace[operator]
    for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
        if state.until[_copy_before(state, tables.reads[k], place)] == place:
            won += tables.sizes[tables.reads[k]]
    copy = state.copy[place]
    before = state.older[copy]
    if before < 0 or state.until[copy] == place:
        return False
    size = tables.sizes[tables.writes[tables.first_write[operator]]]
    for at in range(place - 1, state.until[before], -1):
        if state.memory[at] + size - won > budget:
            return True
    return False


@compiled
def prune(
    tables: Tables,
    state: State,
    other: State,
    length: int,
    budget: int,
    seen: Array,
    places: Array,
    passes: int,
) -> int:
    """Take out runs that the budget does not need, the longest first; the new length."""
    changed = True
    while changed and passes > 0:
        passes -= 1
        changed = False
        count = _repeats(tables, state, length, seen, places)
        keys = np.empty(count)
        for k in range(count):
            keys[k] = -tables.durations[state.sequence[places[k]]]
        order = np.argsort(keys, kind="mergesort")
        gone = np.zeros(length, np.int64)
        evaluate(tables, state, length, budget)
        for k in order:
            place = places[k]
            if _is_needed(tables, state, place, budget):
                continue
            gone[place] = 1
            shorter = 0
            for at in range(length):
                if not gone[at]:
                    other.sequence[shorter] = state.sequence[at]
                    shorter += 1
            peak, _ = evaluate(tables, other, shorter, budget)
            if peak > budget:
                gone[place] = 0
            else:
                changed = True
        shorter = 0
        for at in range(length):
            if not gone[at]:
                state.sequence[shorter] = state.sequence[at]
                shorter += 1
        length = shorter
    return length


@compiled
def _duration(tables: Tables, state: State, length: int) -> int:
    time = 0
    for place in range(length):
        time += tables.durations[state.sequence[place]]
    return time


@compiled
def search_neighbourhoods(
    tables: Tables,
    state: State,
    other: State,
    current: Array,
    length: int,
    budget: int,
    deepest: int,
    effort: int,
    number: int,
    best: Array,
    hot: float,
    cold: float,
) -> tuple[int, int]:
    """Ruin and recreate: take some recomputation out, repair with noise, take out what is not needed.

    `current` holds a sequence of `length` within the budget; the best goes to `best`. Returns the lengths
    of the best and of the last. `effort` is about the number of evaluations. `hot` and `cold` are how
    much longer a sequence may get and be taken, as shares of the best extra time.
    """
    np.random.seed(number)
    operators = len(tables.durations)
    seen = np.zeros(operators, np.int64)
    places = np.zeros(len(state.sequence), np.int64)
    now = 0
    for place in range(length):
        now += tables.durations[current[place]]
    base = 0
    for k in range(operators):
        base += tables.durations[k]
    best[:length] = current[:length]
    best_length = length
    best_time = now
    spent = 0
    while spent < effort:
        heat = hot * (cold / hot) ** (spent / effort)
        state.sequence[:length] = current[:length]
        count = _repeats(tables, state, length, seen, places)
        if count == 0:
            break
        kind = np.random.random()
        goes = np.zeros(length, np.int64)
        if kind < 0.4:
            few = 1 + np.random.randint(max(1, min(count, 6)))
            for _ in range(few):
                goes[places[np.random.randint(count)]] = 1
        else:
            width = 1 + np.random.randint(max(2, min(count // 2 + 1, 12)))
            at = np.random.randint(count)
            share = 0.4 + 0.6 * np.random.random()
            for k in range(max(0, at - width), min(count, at + width)):
                if np.random.random() < share:
                    goes[places[k]] = 1
        shorter = 0
        for at in range(length):
            if not goes[at]:
                state.sequence[shorter] = state.sequence[at]
                shorter += 1
        # Much longer than what was taken out is not accepted.
        room = now - _duration(tables, state, shorter) + 1 + int(4 * heat * max(1, best_time - base))
        room += room // 4
        longer, overflow, tried = repair(tables, state, other, shorter, budget, deepest, 200, 0.8, room)
        spent += tried + count
        if overflow > 0:
            continue
        pruned = prune(tables, state, other, longer, budget, seen, places, 1)
        time = _duration(tables, state, pruned)
        if time <= now or np.random.random() < math.exp((now - time) / (heat * max(1, best_time - base))):
            current[:pruned] = state.sequence[:pruned]
            length = pruned
            now = time
            if now < best_time:
                best_time = now
                best_length = length
                best[:length] = current[:length]
    return best_length, length


@compiled
def _range_of(tables: Tables, sequence: Array, length: int, place: int) -> tuple[int, int]:
    """The first and last place that a run may move to without passing one that it shares data with."""
    operator = sequence[place]
    first = place
    while first > 0:
        before = sequence[first - 1]
        stop = before == operator
        for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
            stop = stop or tables.producer[tables.reads[k]] == before
        for k in range(tables.first_read[before], tables.first_read[before + 1]):
            # An earlier copy is read there.
            stop = stop or tables.producer[tables.reads[k]] == operator
        if stop:
            break
        first -= 1
    last = place
    while last < length - 1:
        after = sequence[last + 1]
        stop = after == operator
        for k in range(tables.first_read[after], tables.first_read[after + 1]):
            stop = stop or tables.producer[tables.reads[k]] == operator
        for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
            stop = stop or tables.producer[tables.reads[k]] == after
        if stop:
            break
        last += 1
    return first, last


@compiled
def _move(sequence: Array, place: int, to: int) -> None:
    operator = sequence[place]
    if to < place:
        for k in range(place, to, -1):
            sequence[k] = sequence[k - 1]
    else:
        for k in range(place, to):
            sequence[k] = sequence[k + 1]
    sequence[to] = operator


@compiled
def reorder(
    tables: Tables,
    state: State,
    other: State,
    length: int,
    budget: int,
    steps: int,
    number: int,
    hot: float,
    cold: float,
) -> float:
    """Move runs until no more than the budget is held; the overflow left. Data stay as they are.

    Annealing on the sum of what is held above the budget; `hot` and `cold` are temperatures as shares
    of the mean size. The best sequence is left in `state`.
    """
    np.random.seed(number)
    unit = 1.0 + np.mean(tables.sizes)
    _, energy = evaluate(tables, state, length, budget)
    best = state.sequence[:length].copy()
    lowest = energy
    for step in range(steps):
        if lowest == 0:
            break
        heat = unit * hot * (cold / hot) ** (step / steps)
        place = np.random.randint(length)
        if np.random.random() < 0.5:
            # One that is in memory when there is too much.
            for _ in range(20):
                if state.memory[place] > budget:
                    break
                place = np.random.randint(length)
        first, last = _range_of(tables, state.sequence, length, place)
        if first == last:
            continue
        to = first + np.random.randint(last - first + 1)
        if np.random.random() < 0.5:
            reach = 1 + np.random.randint(12)
            to = min(max(to, place - reach), place + reach)
        if to == place:
            continue
        other.sequence[:length] = state.sequence[:length]
        _move(other.sequence, place, to)
        _, moved = evaluate(tables, other, length, budget)
        if moved <= energy or np.random.random() < math.exp((energy - moved) / heat):
            energy = moved
            state.sequence[:length] = other.sequence[:length]
            state.memory[:length] = other.memory[:length]
            if energy < lowest:
                lowest = energy
                best[:] = state.sequence[:length]
    state.sequence[:length] = best
    evaluate(tables, state, length, budget)
    return lowest


@compiled
def _crowded_place(state: State, length: int, budget: int) -> int:
    """A place, each with equal chance, where more than the budget is held; -1 if there is none."""
    found = -1
    count = 0
    for place in range(length):
        if state.memory[place] > budget:
            count += 1
            if np.random.randint(count) == 0:
                found = place
    return found


@compiled
def _with_random_repeat(
    tables: Tables,
    state: State,
    length: int,
    budget: int,
    deepest: int,
    marks: Array,
    chosen: Array,
    target: Array,
) -> tuple[int, int]:
    """The sequence with something computed again that was in memory at a place without use.

    Its length, 0 where the draw finds nothing, and the time added.
    """
    place = _crowded_place(state, length, budget)
    if place < 0 or np.random.random() < 0.1:
        place = np.random.randint(length)
    copies = state.copy[place]
    if copies == 0:
        return 0, 0
    at_work = state.sequence[place]
    for _ in range(30):
        copy = np.random.randint(copies)
        if state.until[copy] <= place:
            continue
        born = state.sequence[state.born[copy]]
        storage = tables.writes[tables.first_write[born] + copy - state.copy[state.born[copy]]]
        if _reads(tables, at_work, storage):
            continue
        following = _next_use(tables, state, place, storage, state.until[copy])
        if np.random.random() < 0.1:
            following = max(place + 1, following - np.random.randint(5))
        depth = 0
        while depth < deepest and np.random.random() < 0.4:
            depth += 1
        count, time = _chosen_again(tables, state, storage, following, depth, marks, chosen)
        if count < 0 or length + count + 3 > len(target):
            return 0, 0
        return _with_inserted(state.sequence, length, following, chosen, count, target), time
    return 0, 0


@compiled
def _with_one_less(source: Array, length: int, place: int, target: Array) -> int:
    """Write the sequence without the run at a place into `target`; its length."""
    target[:place] = source[:place]
    target[place : length - 1] = source[place + 1 : length]
    return length - 1


@compiled
def _overflow_without(tables: Tables, state: State, place: int, budget: int, enough: float) -> float:
    """No more than the overflow would be without a run; it stops counting beyond `enough`.

    The copy before would have to stay until then. All that is won are inputs that end here.
    """
    operator = state.sequence[place]
    copy = state.copy[place]
    before = state.older[copy]
    if before < 0 or state.until[copy] == place:
        return 0.0
    won = 0
    for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
        if state.until[_copy_before(state, tables.reads[k], place)] == place:
            won += tables.sizes[tables.reads[k]]
    size = tables.sizes[tables.writes[tables.first_write[operator]]]
    overflow = 0.0
    for at in range(place - 1, state.until[before], -1):
        overflow += max(0, state.memory[at] + size - won - budget)
        if overflow > enough:
            break
    return overflow


@compiled
def anneal(
    tables: Tables,
    state: State,
    other: State,
    spare: State,
    current: Array,
    length: int,
    budget: int,
    steps: int,
    number: int,
    hot: float,
    cold: float,
    weight: float,
    moves: float,
    best: Array,
) -> tuple[int, int]:
    """Anneal on duration and overflow; the lengths of the best sequence within the budget and of the last.

    `current` holds a sequence of `length`; the best goes to `best` (length 0 for none). `hot` and
    `cold` are temperatures in units of the mean duration, `weight` is the price of holding the mean
    size above the budget for one run, in the same. A share `moves` of the steps moves a run.
    """
    np.random.seed(number)
    operators = len(tables.durations)
    seen = np.zeros(operators, np.int64)
    places = np.zeros(len(state.sequence), np.int64)
    marks = np.zeros(operators, np.int64)
    chosen = np.zeros(operators, np.int64)
    unit = 1e-9 + np.mean(tables.durations)
    price = weight * unit / (1e-9 + np.mean(tables.sizes))
    state.sequence[:length] = current[:length]
    _, overflow = evaluate(tables, state, length, budget)
    time = _duration(tables, state, length)
    best_length = 0
    best_time = 0
    if overflow == 0:
        best_length = length
        best_time = time
        best[:length] = state.sequence[:length]
    repeats = _repeats(tables, state, length, seen, places)
    for step in range(steps):
        heat = unit * hot * (cold / hot) ** (step / steps)
        # No more than this may be lost, and what is sure to lose more is not evaluated.
        limit = -heat * math.log(1.0 - np.random.random())
        draw = np.random.random()
        changed = length
        now = time
        if draw < moves:
            place = np.random.randint(length)
            first, last = _range_of(tables, state.sequence, length, place)
            reach = 1 + np.random.randint(12) if np.random.random() < 0.6 else length
            first = max(first, place - reach)
            last = min(last, place + reach)
            if first == last:
                continue
            other.sequence[:length] = state.sequence[:length]
            _move(other.sequence, place, first + np.random.randint(last - first + 1))
        elif draw < moves + (1 - moves) * 0.5 and repeats > 0:
            place = places[np.random.randint(repeats)]
            operator = state.sequence[place]
            again = np.random.random()
            allowed = overflow + (limit + tables.durations[operator]) / price
            if again >= 0.7 and _overflow_without(tables, state, place, budget, allowed) > allowed:
                continue
            changed = _with_one_less(state.sequence, length, place, other.sequence)
            now -= tables.durations[operator]
            if again < 0.2:
                # The same run elsewhere.
                to = place + np.random.randint(-30, 31)
                if to <= 0 or to >= changed or not _is_among(operator, other.sequence, to):
                    continue
                now += tables.durations[operator]
                for at in range(changed, to, -1):
                    other.sequence[at] = other.sequence[at - 1]
                other.sequence[to] = operator
                changed += 1
            elif again < 0.7:
                _, left = evaluate(tables, other, changed, budget)
                if left > 0:
                    changed, more = _with_random_repeat(
                        tables, other, changed, budget, 6, marks, chosen, spare.sequence
                    )
                    now += more
                    other.sequence[:changed] = spare.sequence[:changed]
        else:
            changed, more = _with_random_repeat(
                tables, state, length, budget, 6, marks, chosen, other.sequence
            )
            now += more
        if changed == 0 or now - time - price * overflow > limit:
            continue
        _, left = evaluate(tables, other, changed, budget)
        if now - time + price * (left - overflow) <= limit:
            length, time, overflow = changed, now, left
            state, other = other, state
            repeats = _repeats(tables, state, length, seen, places)
            if overflow == 0 and (best_length == 0 or time < best_time):
                best_time = time
                best_length = length
                best[:length] = state.sequence[:length]
    current[:length] = state.sequence[:length]
    return best_length, length
