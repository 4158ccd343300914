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


def test_a_request_of_no_bytes_takes_no_chunk():
    arena = Arena(SMALL)
    assert arena.lend(0) is None
    arena.take_back(None)
    assert arena.held_bytes == 0


@dataclass
class Piece:
    address: int
    size_bytes: int
    is_free: bool


class NaiveArena:
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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 150) | st.integers(120, 600), st.integers(0, 30)), min_size=1, max_size=60))
def test_the_arena_equals_a_naive_one(moves: list[tuple[int, int]]):
    arena, naive = Arena(SMALL), NaiveArena(SMALL)
    lent: list[tuple[Chunk, Piece]] = []
    peak = 0
    for size, choice in moves:
        if choice < len(lent):
            chunk, piece = lent.pop(choice)
            arena.take_back(chunk)
            naive.take_back(piece)
        else:
            chunk, piece = lend(arena, size), naive.lend(size)
            assert (chunk.address, chunk.size_bytes) == (piece.address, piece.size_bytes)
            lent.append((chunk, piece))
        peak = max(peak, naive.in_use_bytes)
        assert (arena.in_use_bytes, arena.peak_bytes) == (naive.in_use_bytes, peak)
        assert arena.held_bytes == -naive.lowest


def test_the_arena_of_a_schedule_has_the_simulated_peak():
    """Without rounding, and with regions that fit, there is no excess."""
    exact = ArenaSettings(granule_bytes=1, first_region_bytes=1, max_region_bytes=1, max_dead_bytes=1)
    graph = chain(9)
    for discarded in (frozenset[str](), frozenset({"t1", "t2", "t4", "t5"})):
        schedule = build_schedule(graph, discarded, copy_name)
        found = simulate_arena(schedule, graph, exact, steps=3)
        assert found.peak_bytes == found.held_bytes == simulate(schedule, graph).peak_bytes


@pytest.mark.parametrize("first", [True, False])
def test_a_workspace_is_allocated_before_or_after_the_output(first: bool):
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
