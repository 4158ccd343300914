"""Inner loops of the search, compiled by numba on first use and cached on disk.

One file of more than 450 lines, on purpose: numba's disk cache of a compiled function notices changes of
the function's own file only. A helper in another file could change without recompilation of its callers.

A sequence occupies the first `length` elements of an array. `evaluate` equals
`onnxgc.budget.operator_problem.simulate_sequence`, which tests check.
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
    """The function as machine code, compiled on first use and cached on disk."""
    return cast(Function, njit(cache=True, nogil=True)(function))


def helper(function: Function) -> Function:
    """The same for a function that only compiled functions call, without an entry point for Python."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, njit(cache=True, nogil=True, **options)(function))


def inlined(function: Function) -> Function:
    """The same for a part of a hot loop: a call would pass many arrays."""
    return cast(Function, njit(cache=True, nogil=True, inline="always")(function))


# Problems and sequences as arrays


class Tables(NamedTuple):
    """A problem as arrays; operator `i` reads `reads[first_read[i]:first_read[i + 1]]`."""

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
    min_writes: Array
    may_repeat: Array


def tables_of(problem: OperatorProblem) -> Tables:
    """The arrays of a problem, all of 64-bit integers."""
    operators = problem.operators

    def starts(lists: list[tuple[int, ...]]) -> Array:
        return np.concatenate(([0], np.cumsum([len(entry) for entry in lists]))).astype(np.int64)

    reads = [operator.reads for operator in operators]
    writes = [operator.writes for operator in operators]

    def flat(values: Any) -> Array:
        return np.asarray(list(values), np.int64)

    return Tables(
        starts(reads),
        flat(storage for entry in reads for storage in entry),
        starts(list(problem.readers)),
        flat(reader for entry in problem.readers for reader in entry),
        starts(writes),
        flat(storage for entry in writes for storage in entry),
        flat(problem.sizes),
        flat(problem.producer),
        flat(sorted(problem.kept)),
        flat(operator.duration for operator in operators),
        flat(operator.workspace for operator in operators),
        flat(-1 if operator.in_place is None else operator.in_place for operator in operators),
        flat(operator.min_writes for operator in operators),
        flat(operator.may_repeat for operator in operators),
    )


class State(NamedTuple):
    """A sequence, and the copies and the memory that `evaluate` finds for it.

    By position in the sequence: `memory`, the live bytes there; `first_copy`, the number of the first copy
    written there; `reusable`, the copy whose memory its operator may reuse in place. By copy: `last_use`,
    the position of its last reader; `written_at`, the position of its run; `previous`, the copy of the same
    storage before it. By storage: `latest`, the latest copy.
    """

    sequence: Array
    memory: Array
    first_copy: Array
    reusable: Array
    last_use: Array
    written_at: Array
    previous: Array
    latest: Array


def state_for(tables: Tables, max_length: int) -> State:
    """Arrays for sequences of up to `max_length` runs."""
    max_writes = int(np.max(np.diff(tables.first_write), initial=1))

    def zeros(count: int) -> Array:
        return np.zeros(count, np.int64)

    runs, copies = max_length + 3, (max_length + 2) * max_writes
    return State(
        zeros(runs),
        zeros(runs),
        zeros(runs),
        zeros(runs),
        zeros(copies),
        zeros(copies),
        zeros(copies),
        np.full(len(tables.sizes), -1, np.int64),
    )


class Scratch(NamedTuple):
    """Arrays by operator for `_recomputation`: `marks`, all zero between calls, and `chosen`, its result."""

    marks: Array
    chosen: Array


@helper
def _scratch(tables: Tables) -> Scratch:
    operators = len(tables.durations)
    return Scratch(np.zeros(operators, np.int64), np.zeros(operators, np.int64))


# Simulation


@compiled
def evaluate(tables: Tables, state: State, length: int, budget: int) -> tuple[int, float]:
    """Peak, and the overflow: the sum over all positions of live bytes above the budget."""
    sequence, memory, first_copy, reusable, last_use, written_at, previous, latest = state
    latest[:] = -1
    count = 0
    for position in range(length):
        operator = sequence[position]
        for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
            last_use[latest[tables.reads[k]]] = position
        reusable[position] = latest[tables.in_place[operator]] if tables.in_place[operator] >= 0 else -1
        memory[position] = 0
        first_copy[position] = count
        for k in range(tables.first_write[operator], tables.first_write[operator + 1]):
            previous[count] = latest[tables.writes[k]]
            latest[tables.writes[k]] = count
            last_use[count] = position
            written_at[count] = position
            count += 1
    first_copy[length] = count
    memory[length] = 0
    memory[length + 1] = 0
    for storage in tables.kept:
        last_use[latest[storage]] = length
    for position in range(length):
        operator = sequence[position]
        first = tables.first_write[operator]
        written = tables.first_write[operator + 1] - first
        while written > tables.min_writes[operator] and last_use[first_copy[position] + written - 1] == position:
            written -= 1
        for k in range(written):
            size = tables.sizes[tables.writes[first + k]]
            memory[position] += size
            memory[last_use[first_copy[position] + k] + 1] -= size
    peak = 0
    overflow = 0.0
    live = 0
    for position in range(length):
        operator = sequence[position]
        live += memory[position]
        now = live + tables.workspace[operator]
        if reusable[position] >= 0 and last_use[reusable[position]] == position:
            now -= tables.sizes[tables.writes[tables.first_write[operator]]]
        memory[position] = now
        if now > peak:
            peak = now
        if now > budget:
            overflow += now - budget
    return peak, overflow


# Questions about a sequence


@helper
def _reads(tables: Tables, operator: int, storage: int) -> bool:
    for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
        if tables.reads[k] == storage:
            return True
    return False


@helper
def _next_use(tables: Tables, state: State, position: int, storage: int, end: int) -> int:
    """The first position after `position` and before `end` whose operator reads a storage, else `end`."""
    for later in range(position + 1, end):
        if _reads(tables, state.sequence[later], storage):
            return later
    return end


@helper
def _copy_before(state: State, storage: int, position: int) -> int:
    """The latest copy of a storage that is written before a position."""
    copy: int = state.latest[storage]
    while copy >= 0 and state.written_at[copy] >= position:
        copy = state.previous[copy]
    return copy


@helper
def _storage_of(tables: Tables, state: State, copy: int) -> int:
    position = state.written_at[copy]
    number: int = tables.writes[tables.first_write[state.sequence[position]] + copy - state.first_copy[position]]
    return number


@helper
def _is_among(operator: int, chosen: Array, count: int) -> bool:
    for k in range(count):
        if chosen[k] == operator:
            return True
    return False


@helper
def _repeats(tables: Tables, state: State, length: int) -> Array:
    """The positions of runs that are not their operator's first."""
    seen = np.zeros(len(tables.durations), np.bool_)
    positions = np.zeros(length, np.int64)
    count = 0
    for position in range(length):
        if seen[state.sequence[position]]:
            positions[count] = position
            count += 1
        seen[state.sequence[position]] = True
    return positions[:count]


@helper
def _duration(tables: Tables, sequence: Array, length: int) -> int:
    time: int = np.sum(tables.durations[sequence[:length]])
    return time


@helper
def _bytes_ending_at(tables: Tables, state: State, position: int) -> int:
    """Bytes of the inputs whose lifetime ends at a position."""
    operator = state.sequence[position]
    size = 0
    for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
        if state.last_use[_copy_before(state, tables.reads[k], position)] == position:
            size += tables.sizes[tables.reads[k]]
    return size


# Changes of a sequence


@helper
def _with_inserted(source: Array, length: int, position: int, chosen: Array, count: int, target: Array) -> int:
    """Write the sequence with `count` chosen operators before a position into `target`; return its length."""
    target[:position] = source[:position]
    target[position : position + count] = chosen[:count]
    target[position + count : length + count] = source[position:length]
    return length + count


@helper
def _without_position(source: Array, length: int, position: int, target: Array) -> int:
    """Write the sequence without the run at a position into `target`; return its length."""
    target[:position] = source[:position]
    target[position : length - 1] = source[position + 1 : length]
    return length - 1


@helper
def _without_marked(source: Array, length: int, is_removed: Array, target: Array) -> int:
    """Write the sequence without marked positions into `target`, which may be `source`; return its length."""
    shorter = 0
    for position in range(length):
        if not is_removed[position]:
            target[shorter] = source[position]
            shorter += 1
    return shorter


@helper
def _move(sequence: Array, position: int, to: int) -> None:
    operator = sequence[position]
    if to < position:
        for k in range(position, to, -1):
            sequence[k] = sequence[k - 1]
    else:
        for k in range(position, to):
            sequence[k] = sequence[k + 1]
    sequence[to] = operator


@helper
def _recomputation(
    tables: Tables, state: State, storage: int, position: int, depth: int, scratch: Scratch
) -> tuple[int, int]:
    """Write the operators that recompute a storage before a position into `scratch.chosen`, in order.

    Inputs that are no longer live there are recomputed too, up to `depth` operators deep; the lifetime
    of other inputs becomes longer. Returns the number and the time of the operators; a number of -1
    if the storage's operator must not repeat.
    """
    marks, chosen = scratch
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
                    if state.last_use[_copy_before(state, read, position)] < position:
                        marks[producer] = marks[operator] - 1
                        lowest = min(lowest, producer)
        operator -= 1
    for k in range(count):
        marks[chosen[k]] = 0
    chosen[:count] = chosen[:count][::-1].copy()
    if not tables.may_repeat[start]:
        return -1, 0
    return count, time


# Random numbers


@compiled
def seed(number: int) -> None:
    """Seed the random numbers of all compiled loops."""
    np.random.seed(number)


# Repair: greedy insertion of recomputation

MAX_DEPTH = 40
"""Operators that repair recomputes for one storage, each for the next."""


class Insertions(NamedTuple):
    """The best recomputations found in a round of `repair`, by falling score; unused ones score 0.

    Each recomputes a `storage` before a `position`, with inputs up to `depth` operators deep.
    """

    score: Array
    storage: Array
    position: Array
    depth: Array


@compiled
def repair(
    tables: Tables, state: State, other: State, length: int, budget: int, max_rounds: int, noise: float, max_time: int
) -> tuple[int, float, int]:
    """Insert recomputation until the budget holds or no insertion helps.

    Each round estimates the overflow removed for the time added, for each storage that is live but
    unused at the peak and each depth of recomputation; simulates the best estimates, and takes the best
    of those. It stops once it has added more than `max_time`.

    Returns the new length, the overflow left, and the work in units of one evaluation.
    """
    count = 12
    best = Insertions(np.zeros(count), np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64))
    scratch = _scratch(tables)
    excess = np.zeros(len(state.sequence))
    added = rounds = work = 0
    _, overflow = evaluate(tables, state, length, budget)
    while rounds < max_rounds and overflow > 0:
        rounds += 1
        work += 4 * length
        excess[:length] = np.maximum(0, state.memory[:length] - budget)
        peak_position = int(np.argmax(state.memory[:length]))
        best.score[:] = 0.0
        work += _find_insertions(tables, state, peak_position, noise, excess, scratch, best)
        taken, simulated = _best_simulated(tables, state, other, length, budget, overflow, scratch, best)
        work += 3 * length * simulated
        if taken < 0:
            break
        count, time = _recomputation(
            tables, state, best.storage[taken], best.position[taken], best.depth[taken], scratch
        )
        added += time
        if added > max_time:
            break
        longer = _with_inserted(state.sequence, length, best.position[taken], scratch.chosen, count, other.sequence)
        state.sequence[:longer] = other.sequence[:longer]
        length = longer
        _, overflow = evaluate(tables, state, length, budget)
    return length, overflow, work // (3 * length + 1)


@helper
def _find_insertions(
    tables: Tables, state: State, peak_position: int, noise: float, excess: Array, scratch: Scratch, best: Insertions
) -> int:
    """Write the recomputations of the best estimates into `best`; return the work.

    `excess` are the live bytes above the budget at each position.
    """
    work = 0
    running = state.sequence[peak_position]
    for copy in range(state.first_copy[peak_position]):
        if state.last_use[copy] <= peak_position:
            continue
        storage = _storage_of(tables, state, copy)
        size = tables.sizes[storage]
        if size == 0 or not tables.may_repeat[tables.producer[storage]] or _reads(tables, running, storage):
            continue
        following = _next_use(tables, state, peak_position, storage, state.last_use[copy])
        start = peak_position
        while start > state.written_at[copy] + 1 and not _reads(tables, state.sequence[start - 1], storage):
            start -= 1
        work += following - start + 8
        gain = 0.0
        for position in range(start, following):
            gain += min(excess[position], float(size))
        before = -1
        for depth in range(MAX_DEPTH + 1):
            count, time = _recomputation(tables, state, storage, following, depth, scratch)
            if count == before or count < 0:
                break
            before = count
            loss, visited = _loss_by_longer_inputs(tables, state, following, scratch.chosen, count, excess)
            work += 8 * count + visited
            score = (gain - loss) / (time + 1.0)
            if noise > 0:
                score *= 1 + noise * (np.random.random() - 0.5)
            _offer(best, score, storage, following, depth)
    return work


@helper
def _loss_by_longer_inputs(
    tables: Tables, state: State, position: int, chosen: Array, count: int, excess: Array
) -> tuple[float, int]:
    """Bytes that inputs of chosen operators add at positions above the budget, and the positions visited.

    The operators run before `position`; inputs whose lifetime ended earlier stay live until then.
    """
    loss = 0.0
    visited = 0
    for k in range(count):
        for j in range(tables.first_read[chosen[k]], tables.first_read[chosen[k] + 1]):
            read = tables.reads[j]
            end = state.last_use[_copy_before(state, read, position)]
            if end >= position or _is_among(tables.producer[read], chosen, count):
                continue
            visited += position - end
            for at in range(end + 1, position):
                if excess[at] > 0:
                    loss += tables.sizes[read]
    return loss, visited


@helper
def _offer(best: Insertions, score: float, storage: int, position: int, depth: int) -> None:
    """Insert a recomputation into the best ones by its score, if it is better than the last of them."""
    k = len(best.score) - 1
    if not score > best.score[k]:
        return
    while k > 0 and best.score[k - 1] < score:
        best.score[k] = best.score[k - 1]
        best.storage[k] = best.storage[k - 1]
        best.position[k] = best.position[k - 1]
        best.depth[k] = best.depth[k - 1]
        k -= 1
    best.score[k] = score
    best.storage[k] = storage
    best.position[k] = position
    best.depth[k] = depth


@helper
def _best_simulated(
    tables: Tables,
    state: State,
    other: State,
    length: int,
    budget: int,
    overflow: float,
    scratch: Scratch,
    best: Insertions,
) -> tuple[int, int]:
    """The insertion that removes the most overflow for its time by simulation, and the simulations done.

    The former is -1 if none removes any.
    """
    max_length = len(state.sequence) - 3
    taken = -1
    taken_score = 0.0
    simulated = 0
    for k in range(len(best.score)):
        if best.score[k] <= taken_score:
            break
        count, time = _recomputation(tables, state, best.storage[k], best.position[k], best.depth[k], scratch)
        if length + count > max_length:
            continue
        longer = _with_inserted(state.sequence, length, best.position[k], scratch.chosen, count, other.sequence)
        simulated += 1
        _, left = evaluate(tables, other, longer, budget)
        score = (overflow - left) / (time + 1.0)
        if score > taken_score:
            taken_score = score
            taken = k
    return taken, simulated


# Eviction: an order run under the budget, with recomputation on demand


class Pool(NamedTuple):
    """Storages in memory while an order runs.

    By storage: `is_live`; `is_kept`, to the end; `pins`, the number of waiting operators that read it;
    `next_reader`, the position in `Tables.readers` of the first that has not run. By operator: `position`
    in the order; `has_run`; `seen` and `chain`, scratch arrays of `_recompute_time`. `listed` begins with
    the live storages.
    """

    is_live: Array
    is_kept: Array
    pins: Array
    next_reader: Array
    position: Array
    has_run: Array
    seen: Array
    chain: Array
    listed: Array


@helper
def _empty_pool(tables: Tables, order: Array) -> Pool:
    operators = len(tables.durations)
    storages = len(tables.sizes)
    is_kept = np.zeros(storages, np.bool_)
    is_kept[tables.kept] = True
    position = np.zeros(operators, np.int64)
    position[order] = np.arange(operators)
    return Pool(
        np.zeros(storages, np.bool_),
        is_kept,
        np.zeros(storages, np.int64),
        tables.first_reader.copy(),
        position,
        np.zeros(operators, np.bool_),
        np.zeros(operators, np.int64),
        np.zeros(operators, np.int64),
        np.zeros(storages, np.int64),
    )


@compiled
def run_on_demand(tables: Tables, state: State, order: Array, budget: int, by_size: float, by_distance: float) -> int:
    """Run operators in an order; evict storages for room, and recompute missing ones.

    Storages are evicted first that are cheap to recompute, large, and not needed soon: `by_size` and
    `by_distance` are the weights of the latter two, as exponents. Returns the length, 0 for failure.
    """
    operators = len(tables.durations)
    max_length = len(state.sequence) - 3
    pool = _empty_pool(tables, order)
    stack = np.zeros(operators + 1, np.int64)
    live_bytes = live_count = length = mark = 0
    for now in range(operators + len(tables.kept)):
        if now < operators:
            stack[0] = order[now]
        elif pool.is_live[tables.kept[now - operators]]:
            continue
        else:
            stack[0] = tables.producer[tables.kept[now - operators]]
        depth = 0
        _pin_inputs(tables, pool, stack[0], 1)
        while depth >= 0:
            operator = stack[depth]
            missing = _missing_producer(tables, pool, operator)
            if missing >= 0:
                if not tables.may_repeat[missing] or depth == operators:
                    return 0
                depth += 1
                stack[depth] = missing
                _pin_inputs(tables, pool, missing, 1)
                continue
            # An eviction may discard an output of the operator itself.
            while live_bytes + _missing_bytes(tables, pool, operator) > budget:
                evicted, mark = _evicted(tables, pool, live_count, now, mark, by_size, by_distance)
                if evicted < 0:
                    return 0
                storage = pool.listed[evicted]
                pool.is_live[storage] = False
                live_bytes -= tables.sizes[storage]
                live_count -= 1
                pool.listed[evicted] = pool.listed[live_count]
            if length == max_length:
                return 0
            state.sequence[length] = operator
            length += 1
            pool.has_run[operator] = True
            live_bytes += _missing_bytes(tables, pool, operator) - tables.workspace[operator]
            live_count = _add_outputs(tables, pool, live_count, operator)
            _pin_inputs(tables, pool, operator, -1)
            depth -= 1
    # At the end a kept storage may have been evicted for the recomputation of another.
    peak, _ = evaluate(tables, state, length, budget)
    return length if peak <= budget else 0


@helper
def _pin_inputs(tables: Tables, pool: Pool, operator: int, change: int) -> None:
    for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
        pool.pins[tables.reads[k]] += change


@helper
def _missing_producer(tables: Tables, pool: Pool, operator: int) -> int:
    """The producer of an operator's last input that is not live; -1 if all are."""
    missing = -1
    for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
        if not pool.is_live[tables.reads[k]]:
            missing = tables.producer[tables.reads[k]]
    return missing


@helper
def _missing_bytes(tables: Tables, pool: Pool, operator: int) -> int:
    """Bytes of an operator's workspace and of its outputs that are not live."""
    size: int = tables.workspace[operator]
    for k in range(tables.first_write[operator], tables.first_write[operator + 1]):
        if not pool.is_live[tables.writes[k]]:
            size += tables.sizes[tables.writes[k]]
    return size


@helper
def _add_outputs(tables: Tables, pool: Pool, live_count: int, operator: int) -> int:
    """Add an operator's outputs to the live storages; return the number of these."""
    for k in range(tables.first_write[operator], tables.first_write[operator + 1]):
        if not pool.is_live[tables.writes[k]]:
            pool.is_live[tables.writes[k]] = True
            pool.listed[live_count] = tables.writes[k]
            live_count += 1
    return live_count


@helper
def _evicted(
    tables: Tables, pool: Pool, live_count: int, now: int, mark: int, by_size: float, by_distance: float
) -> tuple[int, int]:
    """The position in `pool.listed` of the storage to evict, -1 for none; and the last mark in `seen`."""
    operators = len(tables.durations)
    evicted = -1
    lowest = 0.0
    for number in range(live_count):
        storage = pool.listed[number]
        producer = tables.producer[storage]
        if pool.pins[storage] > 0 or tables.sizes[storage] == 0:
            continue
        following = _next_reader_position(tables, pool, storage)
        is_needed = pool.is_kept[storage] or following >= 0
        if is_needed and not tables.may_repeat[producer]:
            continue
        if is_needed:
            mark += 1
            time = _recompute_time(tables, pool, producer, mark)
            distance = 1.0 + max(0, (following if following >= 0 else operators) - now)
            score = (time + 1e-3) / (tables.sizes[storage] ** by_size * distance**by_distance)
        else:
            score = -1.0 * tables.sizes[storage]
        if evicted < 0 or score < lowest:
            evicted = number
            lowest = score
    return evicted, mark


@helper
def _next_reader_position(tables: Tables, pool: Pool, storage: int) -> int:
    """The lowest position in the order of a storage's readers that have not run; -1 if all have."""
    end = tables.first_reader[storage + 1]
    while pool.next_reader[storage] < end and pool.has_run[tables.readers[pool.next_reader[storage]]]:
        pool.next_reader[storage] += 1
    following = -1
    for k in range(pool.next_reader[storage], end):
        if not pool.has_run[tables.readers[k]]:
            position = pool.position[tables.readers[k]]
            if following < 0 or position < following:
                following = position
    return following


@helper
def _recompute_time(tables: Tables, pool: Pool, producer: int, mark: int) -> float:
    """The time of an operator and of those that its missing inputs need, up to 50 of them."""
    time = 0.0
    count = 1
    pool.chain[0] = producer
    at = 0
    while at < count and count < 50:
        operator = pool.chain[at]
        time += tables.durations[operator]
        for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
            before = tables.producer[tables.reads[k]]
            if not pool.is_live[tables.reads[k]] and pool.seen[before] != mark:
                pool.seen[before] = mark
                pool.chain[count] = before
                count += 1
        at += 1
    return time


# Pruning: removal of needless runs


@compiled
def prune(tables: Tables, state: State, other: State, length: int, budget: int, max_passes: int) -> int:
    """Remove runs that the budget does not need, the longest first; return the new length."""
    changed = True
    while changed and max_passes > 0:
        max_passes -= 1
        changed = False
        positions = _repeats(tables, state, length)
        is_removed = np.zeros(length, np.int64)
        evaluate(tables, state, length, budget)
        for k in np.argsort(-tables.durations[state.sequence[positions]], kind="mergesort"):
            position = positions[k]
            saved = tables.workspace[state.sequence[position]]
            if _overflow_without(tables, state, position, budget + saved, 0.0) > 0:
                continue
            is_removed[position] = 1
            shorter = _without_marked(state.sequence, length, is_removed, other.sequence)
            peak, _ = evaluate(tables, other, shorter, budget)
            if peak > budget:
                is_removed[position] = 0
            else:
                changed = True
        length = _without_marked(state.sequence, length, is_removed, state.sequence)
    return length


# Ruin and recreate


@compiled
def search_neighbourhoods(
    tables: Tables,
    state: State,
    other: State,
    current: Array,
    length: int,
    budget: int,
    effort: int,
    number: int,
    best: Array,
    hot: float,
    cold: float,
) -> tuple[int, int]:
    """Ruin and recreate: remove some recomputation, repair with noise, and prune.

    `current` is a sequence of `length` within the budget; the best goes to `best`. `effort` is about the
    number of evaluations. A sequence is accepted that is longer by `hot` in the beginning and `cold` in
    the end, roughly, as shares of the best extra time. Returns the lengths of the best and of the last.
    """
    np.random.seed(number)
    now = _duration(tables, current, length)
    base = np.sum(tables.durations)
    best[:length] = current[:length]
    best_length, best_time = length, now
    spent = 0
    while spent < effort:
        heat = hot * (cold / hot) ** (spent / effort)
        state.sequence[:length] = current[:length]
        positions = _repeats(tables, state, length)
        if len(positions) == 0:
            break
        shorter = _ruin(state.sequence, length, positions)
        # Bounds the repair: a sequence much longer than before is not accepted.
        room = now - _duration(tables, state.sequence, shorter) + 1 + int(4 * heat * max(1, best_time - base))
        room += room // 4
        longer, overflow, work = repair(tables, state, other, shorter, budget, 200, 0.8, room)
        spent += work + len(positions)
        if overflow > 0:
            continue
        pruned = prune(tables, state, other, longer, budget, 1)
        time = _duration(tables, state.sequence, pruned)
        if time <= now or np.random.random() < math.exp((now - time) / (heat * max(1, best_time - base))):
            current[:pruned] = state.sequence[:pruned]
            length, now = pruned, time
            if now < best_time:
                best_length, best_time = length, now
                best[:length] = current[:length]
    return best_length, length


@helper
def _ruin(sequence: Array, length: int, positions: Array) -> int:
    """Remove some of the repeats at `positions`, scattered or neighbours; return the new length."""
    count = len(positions)
    is_removed = np.zeros(length, np.int64)
    if np.random.random() < 0.4:
        few = 1 + np.random.randint(max(1, min(count, 6)))
        for _ in range(few):
            is_removed[positions[np.random.randint(count)]] = 1
    else:
        width = 1 + np.random.randint(max(2, min(count // 2 + 1, 12)))
        at = np.random.randint(count)
        share = 0.4 + 0.6 * np.random.random()
        for k in range(max(0, at - width), min(count, at + width)):
            if np.random.random() < share:
                is_removed[positions[k]] = 1
    return _without_marked(sequence, length, is_removed, sequence)


# Reordering: annealing on overflow alone


@helper
def _range_of(tables: Tables, sequence: Array, length: int, position: int) -> tuple[int, int]:
    """The first and last position that a run may move to without passing one that it shares data with."""
    operator = sequence[position]
    first = last = position
    for direction in (-1, 1):
        end = position
        while 0 <= end + direction < length:
            other = sequence[end + direction]
            stop = other == operator
            for k in range(tables.first_read[operator], tables.first_read[operator + 1]):
                stop = stop or tables.producer[tables.reads[k]] == other
            for k in range(tables.first_read[other], tables.first_read[other + 1]):
                # An earlier run may read an earlier copy.
                stop = stop or tables.producer[tables.reads[k]] == operator
            if stop:
                break
            end += direction
        first, last = min(first, end), max(last, end)
    return first, last


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
    """Move runs until the budget holds, by annealing on the overflow; return the overflow left.

    `hot` and `cold` are the first and last temperature as shares of the mean size. The best sequence is
    left in `state`.
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
        position = np.random.randint(length)
        if np.random.random() < 0.5:
            # Prefer a run at which memory exceeds the budget.
            for _ in range(20):
                if state.memory[position] > budget:
                    break
                position = np.random.randint(length)
        first, last = _range_of(tables, state.sequence, length, position)
        if first == last:
            continue
        to = first + np.random.randint(last - first + 1)
        if np.random.random() < 0.5:
            reach = 1 + np.random.randint(12)
            to = min(max(to, position - reach), position + reach)
        if to == position:
            continue
        other.sequence[:length] = state.sequence[:length]
        _move(other.sequence, position, to)
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


# Annealing on duration and overflow: moved, inserted and removed runs


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
    """Anneal on duration and overflow; return the lengths of the best sequence and of the last.

    `current` is a sequence of `length`; the best within the budget goes to `best` (length 0 for none).
    `hot` and `cold` are temperatures in units of the mean duration, `weight` is the price of one run with
    the mean size above the budget, in the same unit. A share `moves` of the steps moves a run.
    """
    np.random.seed(number)
    scratch = _scratch(tables)
    unit = 1e-9 + float(np.mean(tables.durations))
    price = weight * unit / (1e-9 + float(np.mean(tables.sizes)))
    state.sequence[:length] = current[:length]
    _, overflow = evaluate(tables, state, length, budget)
    time = _duration(tables, state.sequence, length)
    best_length, best_time = (length, time) if overflow == 0 else (0, 0)
    best[:best_length] = state.sequence[:best_length]
    repeats = _repeats(tables, state, length)
    for step in range(steps):
        heat = unit * hot * (cold / hot) ** (step / steps)
        # The most that a step may lose; steps that certainly lose more are not evaluated.
        limit = -heat * math.log(1.0 - np.random.random())
        draw = np.random.random()
        if draw < moves:
            changed, added = _try_move(tables, state, other, length), 0
        elif draw < moves + (1 - moves) * 0.5 and len(repeats) > 0:
            position = repeats[np.random.randint(len(repeats))]
            changed, added = _try_removal(
                tables, state, other, spare, length, budget, position, overflow, limit, price, scratch
            )
        else:
            changed, added = _try_random_repeat(tables, state, length, budget, scratch, other.sequence)
        if changed == 0 or added - price * overflow > limit:
            continue
        _, left = evaluate(tables, other, changed, budget)
        if added + price * (left - overflow) <= limit:
            length, time, overflow = changed, time + added, left
            state, other = other, state
            repeats = _repeats(tables, state, length)
            if overflow == 0 and (best_length == 0 or time < best_time):
                best_length, best_time = length, time
                best[:length] = state.sequence[:length]
    current[:length] = state.sequence[:length]
    return best_length, length


@inlined
def _try_move(tables: Tables, state: State, other: State, length: int) -> int:
    """Write the sequence with one run moved into `other`; return its length, 0 if it cannot move."""
    position = np.random.randint(length)
    first, last = _range_of(tables, state.sequence, length, position)
    reach = 1 + np.random.randint(12) if np.random.random() < 0.6 else length
    first = max(first, position - reach)
    last = min(last, position + reach)
    if first == last:
        return 0
    other.sequence[:length] = state.sequence[:length]
    _move(other.sequence, position, first + np.random.randint(last - first + 1))
    return length


@inlined
def _try_removal(
    tables: Tables,
    state: State,
    other: State,
    spare: State,
    length: int,
    budget: int,
    position: int,
    overflow: float,
    limit: float,
    price: float,
    scratch: Scratch,
) -> tuple[int, int]:
    """Write the sequence without the repeat at a position into `other`; return its length and the time added.

    By chance the run is inserted elsewhere, or another recomputation is where memory now exceeds the
    budget. The length is 0 if that is not possible, or if the step certainly loses more than `limit`.
    """
    operator = state.sequence[position]
    draw = np.random.random()
    allowed = overflow + (limit + tables.durations[operator]) / price
    if draw >= 0.7 and _overflow_without(tables, state, position, budget, allowed) > allowed:
        return 0, 0
    changed = _without_position(state.sequence, length, position, other.sequence)
    added = -tables.durations[operator]
    if draw < 0.2:
        to = position + np.random.randint(-30, 31)
        if to <= 0 or to >= changed or not _is_among(operator, other.sequence, to):
            return 0, 0
        other.sequence[changed] = operator
        _move(other.sequence, changed, to)
        return changed + 1, 0
    if draw < 0.7:
        _, left = evaluate(tables, other, changed, budget)
        if left > 0:
            changed, more = _try_random_repeat(tables, other, changed, budget, scratch, spare.sequence)
            added += more
            other.sequence[:changed] = spare.sequence[:changed]
    return changed, added


@compiled
def _overflow_without(tables: Tables, state: State, position: int, budget: int, enough: float) -> float:
    """A lower bound on the overflow without a run; the sum stops beyond `enough`.

    The copy before would stay live until this position. The only saving is inputs whose lifetime ends here.
    """
    copy = state.first_copy[position]
    before = state.previous[copy]
    if before < 0 or state.last_use[copy] == position:
        return 0.0
    saved = _bytes_ending_at(tables, state, position)
    size = tables.sizes[tables.writes[tables.first_write[state.sequence[position]]]]
    overflow = 0.0
    for at in range(position - 1, state.last_use[before], -1):
        overflow += max(0, state.memory[at] + size - saved - budget)
        if overflow > enough:
            break
    return overflow


@helper
def _try_random_repeat(
    tables: Tables, state: State, length: int, budget: int, scratch: Scratch, target: Array
) -> tuple[int, int]:
    """Write the sequence with a recomputation of a storage that is live without use into `target`.

    Returns its length, 0 if the draw finds none, and the time added.
    """
    position = _crowded_position(state, length, budget)
    if position < 0 or np.random.random() < 0.1:
        position = np.random.randint(length)
    copies = state.first_copy[position]
    if copies == 0:
        return 0, 0
    running = state.sequence[position]
    for _ in range(30):
        copy = np.random.randint(copies)
        if state.last_use[copy] <= position:
            continue
        storage = _storage_of(tables, state, copy)
        if _reads(tables, running, storage):
            continue
        following = _next_use(tables, state, position, storage, state.last_use[copy])
        if np.random.random() < 0.1:
            following = max(position + 1, following - np.random.randint(5))
        depth = 0
        while depth < 6 and np.random.random() < 0.4:
            depth += 1
        count, time = _recomputation(tables, state, storage, following, depth, scratch)
        if count < 0 or length + count + 3 > len(target):
            return 0, 0
        return _with_inserted(state.sequence, length, following, scratch.chosen, count, target), time
    return 0, 0


@helper
def _crowded_position(state: State, length: int, budget: int) -> int:
    """A random position at which memory exceeds the budget, each with equal chance; -1 for none."""
    drawn = -1
    count = 0
    for position in range(length):
        if state.memory[position] > budget:
            count += 1
            if np.random.randint(count) == 0:
                drawn = position
    return drawn
