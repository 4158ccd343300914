"""A model of the arena that serves a schedule: bytes in use, with the excess of chunks over requests.

An arena takes memory from the system in regions, lends it in chunks, and joins free neighbours. It lends
the smallest chunk that is large enough, whole unless the rest is worth another chunk. So more is in use
than was requested; the excess depends on the order of requests alone.
"""

import bisect
from dataclasses import dataclass, field

from onnxgc.planning.allocations import Storage, allocations
from onnxgc.planning.schedule import Schedule, StepGraph
from onnxgc.runtime.ort import MAX_DEAD_BYTES


@dataclass(frozen=True, slots=True)
class ArenaSettings:
    """Parameters of an arena.

    Requests are rounded up to `granule_bytes`. A chunk is split where it is twice the request, or where
    its rest would have at least `max_dead_bytes`. The first region has `first_region_bytes`, each later one
    twice as much up to `max_region_bytes`; for a larger request the size is doubled until it fits.
    """

    granule_bytes: int
    first_region_bytes: int
    max_region_bytes: int
    max_dead_bytes: int


# The CPU arena of `onnxgc.runtime.ort.make_session`. Source: onnxruntime/core/framework/bfc_arena.h, whose
# defaults these are (kMinAllocationSize, DEFAULT_INITIAL_CHUNK_SIZE_BYTES,
# DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES, growth by kNextPowerOfTwo), but for the dead bytes.
ARENA = ArenaSettings(
    granule_bytes=256, first_region_bytes=1 << 20, max_region_bytes=1 << 30, max_dead_bytes=MAX_DEAD_BYTES
)


@dataclass(frozen=True, slots=True)
class ArenaProfile:
    """Bytes of an arena that serves training steps: the most lent at once, and the regions taken for it."""

    peak_bytes: int
    held_bytes: int


def simulate_arena(schedule: Schedule, graph: StepGraph, settings: ArenaSettings, *, steps: int = 1) -> ArenaProfile:
    """The arena's bytes while a schedule runs `steps` times.

    It serves the requests that the simulator counts, in the same order: neither parameters nor fed tensors.
    Outputs of a step come back before the next begins, which reuses the regions of those before it.
    """
    arena = Arena(settings)
    operators = list(allocations(schedule, graph))
    for _ in range(steps):
        chunk_of: dict[Storage, Chunk | None] = {}
        for step in operators:
            workspace = step.operator.workspace_bytes
            early = arena.lend(workspace) if step.operator.workspace_first else None
            chunk_of.update((storage, arena.lend(storage.size_bytes)) for storage in step.made)
            arena.take_back(early or arena.lend(workspace))
            for storage in step.freed:
                arena.take_back(chunk_of.pop(storage))
        for chunk in chunk_of.values():
            arena.take_back(chunk)
    return ArenaProfile(arena.peak_bytes, arena.held_bytes)


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a region, between the two that touch it."""

    address: int
    size_bytes: int
    is_free: bool = True
    before: "Chunk | None" = field(default=None, repr=False)
    after: "Chunk | None" = field(default=None, repr=False)


class Arena:
    """Best fit with coalescing, in regions that grow.

    Source: `BFCArena` of ONNX Runtime (onnxruntime/core/framework/bfc_arena.cc), without its bins, which
    only find the smallest chunk faster.
    """

    def __init__(self, settings: ArenaSettings) -> None:
        self._settings = settings
        self._region_bytes = settings.first_region_bytes
        self._lowest_address = 0
        # By size, then by address: the arena lends the first that is large enough.
        self._free: list[tuple[int, int]] = []
        self._free_at: dict[int, Chunk] = {}
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self.held_bytes = 0

    def lend(self, size_bytes: int) -> Chunk | None:
        """A chunk of at least `size_bytes`; None for 0."""
        if size_bytes == 0:
            return None
        granule = self._settings.granule_bytes
        wanted = -(-size_bytes // granule) * granule
        index = bisect.bisect_left(self._free, (wanted,))
        if index == len(self._free):
            self._extend(wanted)
            index = bisect.bisect_left(self._free, (wanted,))
        chunk = self._free_at.pop(self._free.pop(index)[1])
        rest = chunk.size_bytes - wanted
        if rest >= wanted or rest >= self._settings.max_dead_bytes:
            self._split(chunk, wanted)
        chunk.is_free = False
        self.in_use_bytes += chunk.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        return chunk

    def take_back(self, chunk: Chunk | None) -> None:
        """Join a chunk with its free neighbours for later requests."""
        if chunk is None:
            return
        self.in_use_bytes -= chunk.size_bytes
        chunk.is_free = True
        if chunk.after is not None and chunk.after.is_free:
            self._remove(chunk.after)
            self._join(chunk, chunk.after)
        if chunk.before is not None and chunk.before.is_free:
            self._remove(chunk.before)
            self._join(chunk.before, chunk)
            chunk = chunk.before
        self._add(chunk)

    def _extend(self, wanted: int) -> None:
        """Take one more region with room for a request."""
        size = self._region_bytes
        if wanted <= size:
            self._region_bytes = min(2 * size, self._settings.max_region_bytes)
        while size < wanted:
            self._region_bytes = size = 2 * size
        self.held_bytes += size
        # Systems allocate large pieces from the top of the address space down.
        self._lowest_address -= size
        self._add(Chunk(self._lowest_address, size))

    def _split(self, chunk: Chunk, size_bytes: int) -> None:
        """Leave `size_bytes` in the chunk, and make another of the rest."""
        rest = Chunk(chunk.address + size_bytes, chunk.size_bytes - size_bytes, True, chunk, chunk.after)
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.size_bytes, chunk.after = size_bytes, rest
        self._add(rest)

    def _join(self, chunk: Chunk, following: Chunk) -> None:
        chunk.size_bytes += following.size_bytes
        chunk.after = following.after
        if following.after is not None:
            following.after.before = chunk

    def _add(self, chunk: Chunk) -> None:
        bisect.insort(self._free, (chunk.size_bytes, chunk.address))
        self._free_at[chunk.address] = chunk

    def _remove(self, chunk: Chunk) -> None:
        del self._free_at[chunk.address]
        del self._free[bisect.bisect_left(self._free, (chunk.size_bytes, chunk.address))]
