"""The arena lends the same chunks as a naive best fit with coalescing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgc.planning.schedule import Operator, StepGraph, build_schedule
from onnxgc.planning.simulate import simulate
from scripts.benchmarking.arena import Arena, ArenaSettings, Chunk, simulate_arena
from tests.planning.test_schedule import chain, copy_name

SMALL = ArenaSettings(granule_bytes=4, first_region_bytes=32, max_region_bytes=128, max_dead_bytes=16)


def lend(arena: Arena, size_bytes: int) -> Chunk:
    chunk = arena.lend(size_bytes)
    assert chunk is not None
    return chunk


def test_a_request_is_rounded_up() -> None:
    arena = Arena(SMALL)
    assert [lend(arena, size).size_bytes for size in (1, 4, 5)] == [4, 4, 8]
    assert arena.in_use_bytes == arena.peak_bytes == 16


def test_a_request_of_no_bytes_takes_no_chunk() -> None:
    arena = Arena(SMALL)
    assert arena.lend(0) is None
    arena.take_back(None)
    assert arena.held_bytes == 0


@pytest.mark.parametrize(
    "free, asked, lent",
    [
        (12, 12, 12),
        (12, 8, 12),  # The rest is less than the request, and small.
        (16, 8, 8),
        (28, 16, 28),
        (36, 20, 20),  # Too much would be dead.
    ],
)
def test_a_chunk_is_split_where_the_rest_is_large(free: int, asked: int, lent: int) -> None:
    arena = Arena(ArenaSettings(4, 128, 128, 16))
    hole = lend(arena, free)
    lend(arena, 4)  # Keeps the hole from joining the rest of the region.
    arena.take_back(hole)
    assert lend(arena, asked).size_bytes == lent


def test_the_smallest_chunk_that_fits_is_lent_and_the_lowest_among_equals() -> None:
    arena = Arena(ArenaSettings(4, 128, 128, 64))
    holes = [lend(arena, size) for size in (20, 4, 12, 4, 12, 4)]
    for hole in holes[::2]:
        arena.take_back(hole)
    assert lend(arena, 9).address == holes[2].address
    assert lend(arena, 9).address == holes[4].address
    assert lend(arena, 9).address == holes[0].address


def test_neighbours_join_on_both_sides() -> None:
    arena = Arena(SMALL)
    chunks = [lend(arena, 8) for _ in range(4)]
    for index in (0, 2, 1, 3):
        arena.take_back(chunks[index])
    assert lend(arena, 32).address == chunks[0].address
    assert arena.held_bytes == 32


def test_regions_double_up_to_the_largest_unless_a_request_is_larger() -> None:
    arena = Arena(SMALL)
    held = []
    for size in (32, 64, 128, 128, 512, 4):
        lend(arena, size)
        held.append(arena.held_bytes)
    # After a region of 512 the next is as large, and the one after that has the largest size again.
    assert held == [32, 96, 224, 352, 864, 864 + 512]
    lend(arena, 508)
    lend(arena, 4)
    assert arena.held_bytes == 864 + 512 + 128


@dataclass
class Piece:
    """A piece of memory in the naive arena, which has a list of them for each region."""

    address: int
    size_bytes: int
    is_free: bool


class NaiveArena:
    """Best fit over all free pieces, with neighbours joined by a pass over all pieces."""

    def __init__(self, settings: ArenaSettings) -> None:
        self.settings = settings
        self.regions: list[list[Piece]] = []
        self.next_bytes = settings.first_region_bytes
        self.lowest = 0

    @property
    def in_use_bytes(self) -> int:
        return sum(piece.size_bytes for region in self.regions for piece in region if not piece.is_free)

    def lend(self, size_bytes: int) -> Piece:
        granule = self.settings.granule_bytes
        wanted = (size_bytes + granule - 1) // granule * granule
        fitting = self.fitting(wanted)
        if not fitting:
            self.grow(wanted)
            fitting = self.fitting(wanted)
        piece, region = min(fitting, key=lambda found: (found[0].size_bytes, found[0].address))
        rest = piece.size_bytes - wanted
        if piece.size_bytes >= 2 * wanted or rest >= self.settings.max_dead_bytes:
            piece.size_bytes = wanted
            if rest:
                region.insert(region.index(piece) + 1, Piece(piece.address + wanted, rest, True))
        piece.is_free = False
        return piece

    def fitting(self, wanted: int) -> list[tuple[Piece, list[Piece]]]:
        return [
            (piece, region)
            for region in self.regions
            for piece in region
            if piece.is_free and piece.size_bytes >= wanted
        ]

    def grow(self, wanted: int) -> None:
        size = self.next_bytes
        doubled = size
        while doubled < wanted:
            doubled *= 2
        self.next_bytes = doubled if doubled > size else min(2 * size, self.settings.max_region_bytes)
        self.lowest -= doubled
        self.regions.append([Piece(self.lowest, doubled, True)])

    def take_back(self, piece: Piece) -> None:
        piece.is_free = True
        for region in self.regions:
            joined: list[Piece] = []
            for one in region:
                if joined and joined[-1].is_free and one.is_free:
                    joined[-1].size_bytes += one.size_bytes
                else:
                    joined.append(one)
            region[:] = joined


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 150), st.integers(0, 30)), min_size=1, max_size=60))
def test_the_arena_equals_a_naive_one(moves: list[tuple[int, int]]) -> None:
    """Each move requests bytes, or returns one of the lent chunks."""
    arena, naive = Arena(SMALL), NaiveArena(SMALL)
    lent: list[tuple[Chunk, Piece]] = []
    for size, choice in moves:
        if choice < len(lent):
            chunk, piece = lent.pop(choice)
            arena.take_back(chunk)
            naive.take_back(piece)
        else:
            chunk, piece = lend(arena, size), naive.lend(size)
            assert (chunk.address, chunk.size_bytes) == (piece.address, piece.size_bytes)
            lent.append((chunk, piece))
        assert arena.in_use_bytes == naive.in_use_bytes <= arena.peak_bytes <= arena.held_bytes


def test_the_arena_of_a_schedule_has_the_simulated_peak() -> None:
    """Without rounding, and with regions that fit, there is no excess."""
    exact = ArenaSettings(granule_bytes=1, first_region_bytes=1, max_region_bytes=1, max_dead_bytes=1)
    graph = chain(9)
    for discarded in (frozenset[str](), frozenset({"t1", "t2", "t4", "t5"})):
        schedule = build_schedule(graph, discarded, copy_name)
        found = simulate_arena(schedule, graph, exact, steps=3)
        assert found.peak_bytes == found.held_bytes == simulate(schedule, graph).peak_bytes


@pytest.mark.parametrize("first", [True, False])
def test_a_workspace_is_allocated_before_or_after_the_output(first: bool) -> None:
    """The free chunk of 16 bytes serves the first of two requests: a workspace of 12 and an output of 9."""
    graph = StepGraph(
        (
            Operator("f", ("x",), ("hole",)),
            Operator("g", ("x",), ("kept",)),
            Operator("h", ("hole",), ("none",)),
            Operator("w", ("kept",), ("y",), workspace_bytes=12, workspace_first=first),
        ),
        (),
        (),
        {"x": 0, "hole": 16, "kept": 16, "none": 0, "y": 9},
        frozenset({"x"}),
        ("y",),
        frozenset(),
    )
    found = simulate_arena(build_schedule(graph, frozenset(), copy_name), graph, ArenaSettings(1, 32, 32, 16))
    assert found.peak_bytes == (16 + 16 + 9 if first else 16 + 16 + 12)
