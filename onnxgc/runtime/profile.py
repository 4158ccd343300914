"""What a session really did: executed order, kernel time and the allocator's own figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_KERNEL = "_kernel_time"


@dataclass(frozen=True, slots=True)
class RunProfile:
    """One run of a session.

    `order` are the executed nodes' names, `kernel_ns` what each took. `requested_peak_bytes` is the
    most that was asked for at once; `in_use_peak_bytes` includes the arena's slack. Both count graph
    outputs, and the workspaces of kernels as far as they raised the arena's own maximum: that is kept
    over the session's life, so a later run shows workspaces only where they go above all earlier runs.
    """

    order: tuple[str, ...]
    requested_peak_bytes: int
    in_use_peak_bytes: int
    kernel_seconds: float
    nodes_by_provider: dict[str, int]
    kernel_ns: tuple[int, ...]


def read_profile(path: str | Path) -> list[RunProfile]:
    """All runs recorded in an ONNX Runtime profile, in order."""
    events = json.loads(Path(path).read_text())
    runs: list[list[dict[str, object]]] = [[]]
    for event in events:
        if event.get("cat") == "Node" and event.get("name", "").endswith(_KERNEL):
            runs[-1].append(event)
        elif event.get("name") == "model_run":
            runs.append([])
    profiles: list[RunProfile] = []
    # The arena may have served other sessions of the process before.
    arena_peak = max((_number(event, "mem_in_use_peak") for event in runs[0][:1]), default=0)
    for run in runs:
        if run:
            profile, arena_peak = _one_run(run, arena_peak)
            profiles.append(profile)
    return profiles


def _number(event: dict[str, object], key: str) -> int:
    arguments = event["args"]
    assert isinstance(arguments, dict)
    return int(arguments.get(key, 0))


def _one_run(events: Sequence[dict[str, object]], arena_peak: int) -> tuple[RunProfile, int]:
    """The run, and the arena's maximum after it."""
    requested = in_use = 0
    seconds = 0.0
    providers: dict[str, int] = {}
    for event in events:
        arguments = event["args"]
        assert isinstance(arguments, dict)
        held = int(arguments.get("mem_bytes_in_use", 0))
        highest = int(arguments.get("mem_in_use_peak", held))
        # What a kernel gave back before it ended is only in the maximum that it raised.
        workspace = highest - held if highest > arena_peak else 0
        arena_peak = max(arena_peak, highest)
        requested = max(requested, int(arguments.get("mem_bytes_requested_in_use", 0)) + workspace)
        in_use = max(in_use, held + workspace)
        seconds += float(str(event["dur"])) / 1e6
        provider = str(arguments.get("provider", ""))
        providers[provider] = providers.get(provider, 0) + 1
    order = tuple(str(event["name"])[: -len(_KERNEL)] for event in events)
    kernel_ns = tuple(round(1000 * float(str(event["dur"]))) for event in events)
    return RunProfile(order, requested, in_use, seconds, providers, kernel_ns), arena_peak
