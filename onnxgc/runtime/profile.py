"""Profiles of sessions: executed order, kernel time and the allocator's figures."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_KERNEL = "_kernel_time"


@dataclass(frozen=True, slots=True)
class RunProfile:
    """One run of a session, with one entry for each executed node.

    Memory that the session allocated before its first node (constants, prepacked parameters) is excluded.

    Attributes:
        order: node names.
        kernel_ns: kernel time of each node.
        held_bytes: bytes requested and not released when a node ended, graph outputs included.
        in_use_bytes: the same with the arena's slack.
        workspace_bytes: bytes that a kernel released before it ended, slack included, where they raised
            the arena's maximum, else 0. The maximum covers the life of the session, so a later run
            shows a workspace only where it exceeds all earlier runs.
        kernel_seconds: total kernel time.
        nodes_by_provider: number of executed nodes of each provider.
    """

    order: tuple[str, ...]
    kernel_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    in_use_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    kernel_seconds: float
    nodes_by_provider: dict[str, int]

    @property
    def requested_peak_bytes(self) -> int:
        """The highest number of bytes requested at once."""
        return max(map(sum, zip(self.held_bytes, self.workspace_bytes, strict=True)))

    @property
    def in_use_peak_bytes(self) -> int:
        """The highest number of bytes in use at once, with the arena's slack."""
        return max(map(sum, zip(self.in_use_bytes, self.workspace_bytes, strict=True)))

    def requested_peak_without(self, kept_bytes: Mapping[str, int]) -> int:
        """The peak without the outputs of these nodes, in bytes, that stay allocated."""
        peak = kept = 0
        for name, held, workspace in zip(self.order, self.held_bytes, self.workspace_bytes, strict=True):
            kept += kept_bytes.get(name, 0)
            peak = max(peak, held + workspace - kept)
        return peak


def read_profile(path: str | Path, provider: str | None = None) -> list[RunProfile]:
    """All runs recorded in an ONNX Runtime profile, in order.

    Each provider has its own arena. With `provider`, memory refers to that provider's arena, which nodes
    of other providers leave unchanged.
    """
    events = json.loads(Path(path).read_text())
    runs: list[list[_Node]] = [[]]
    for event in events:
        if event.get("cat") == "Node" and event.get("name", "").endswith(_KERNEL):
            runs[-1].append(_Node.of(event))
        elif event.get("name") == "model_run":
            runs.append([])
    if provider is not None:
        runs = [_in_arena_of(provider, nodes) for nodes in runs]
    if not runs[0]:
        return []
    first = runs[0][0]
    session = (first.held - first.held_more, first.in_use - first.in_use_more)
    # Other sessions of the process may have used the arena before.
    arena_peak = first.highest
    profiles: list[RunProfile] = []
    for nodes in filter(None, runs):
        profiles.append(_profile(nodes, session, arena_peak))
        arena_peak = max(arena_peak, *(node.highest for node in nodes))
    return profiles


@dataclass(frozen=True, slots=True)
class _Node:
    """One event: the arena's figures in bytes when a node ended, and their changes by the node."""

    name: str
    provider: str
    microseconds: float
    held: int
    held_more: int
    in_use: int
    in_use_more: int
    highest: int

    @classmethod
    def of(cls, event: dict[str, object]) -> "_Node":
        arguments = event["args"]
        assert isinstance(arguments, dict)
        keys = ("bytes_requested_in_use", "requested_in_use_delta", "bytes_in_use", "in_use_delta", "in_use_peak")
        figures = [int(arguments.get(f"mem_{key}", 0)) for key in keys]
        name = str(event["name"]).removesuffix(_KERNEL)
        return cls(name, str(arguments.get("provider", "")), float(str(event["dur"])), *figures)


def _in_arena_of(provider: str, nodes: Sequence[_Node]) -> list[_Node]:
    """The nodes of a run, where nodes of other providers repeat the figures of this provider."""
    held = in_use = highest = 0
    own = (node for node in nodes if node.provider == provider and node.highest)
    if (first := next(own, None)) is not None:
        held, in_use, highest = first.held - first.held_more, first.in_use - first.in_use_more, first.highest
    found = []
    for node in nodes:
        if node.provider == provider and node.highest:
            held, in_use, highest = node.held, node.in_use, node.highest
            found.append(node)
        else:
            found.append(replace(node, held=held, held_more=0, in_use=in_use, in_use_more=0, highest=highest))
    return found


def _profile(nodes: Sequence[_Node], session: tuple[int, int], arena_peak: int) -> RunProfile:
    """One run, without the memory of the session; `arena_peak` is the arena's maximum before it."""
    workspaces = []
    for node in nodes:
        workspaces.append(node.highest - node.in_use if node.highest > arena_peak else 0)
        arena_peak = max(arena_peak, node.highest)
    held_by_session, in_use_by_session = session
    return RunProfile(
        order=tuple(node.name for node in nodes),
        kernel_ns=tuple(round(1000 * node.microseconds) for node in nodes),
        held_bytes=tuple(node.held - held_by_session for node in nodes),
        in_use_bytes=tuple(node.in_use - in_use_by_session for node in nodes),
        workspace_bytes=tuple(workspaces),
        kernel_seconds=sum(node.microseconds for node in nodes) / 1e6,
        nodes_by_provider=dict(Counter(node.provider for node in nodes)),
    )
