import json
from pathlib import Path
from typing import Any

from onnxgc.runtime.profile import RunProfile, read_profile


def profile_of(runs: list[list[tuple[Any, ...]]], folder: Path, provider: str | None = None) -> list[RunProfile]:
    """The profile of nodes: name, bytes requested, their increase, bytes in use, highest, and another provider."""
    events: list[dict[str, object]] = [{"cat": "Session", "name": "session_initialization", "args": {}}]
    for run in runs:
        for name, held, more, in_use, highest, *other in run:
            figures = {
                "mem_bytes_requested_in_use": held,
                "mem_requested_in_use_delta": more,
                "mem_bytes_in_use": in_use,
                "mem_in_use_delta": more,
                "mem_in_use_peak": highest,
            }
            args = {"provider": other[0] if other else "CPU", **{key: str(value) for key, value in figures.items()}}
            events.append({"cat": "Node", "name": f"{name}_kernel_time", "dur": 2, "args": args})
        events.append({"cat": "Session", "name": "model_run", "args": {}})
    path = folder / "profile.json"
    path.write_text(json.dumps(events))
    return read_profile(path, provider)


def test_memory_of_the_session_is_excluded(tmp_path: Path) -> None:
    (run,) = profile_of([[("a", 1010, 10, 1016, 1016), ("b", 1030, 20, 1048, 1048)]], tmp_path)
    assert run.order == ("a", "b")
    assert run.held_bytes == (10, 30)
    assert run.in_use_bytes == (10, 42)
    assert (run.requested_peak_bytes, run.in_use_peak_bytes) == (30, 42)
    assert run.kernel_ns == (2000, 2000)
    assert run.nodes_by_provider == {"CPU": 2}


def test_a_workspace_appears_where_it_raises_the_maximum(tmp_path: Path) -> None:
    nodes = [("a", 10, 10, 10, 10), ("b", 20, 10, 20, 50), ("c", 30, 10, 30, 50), ("d", 40, 10, 40, 60)]
    first, second = profile_of([nodes, [(*node[:4], 60) for node in nodes]], tmp_path)
    assert first.workspace_bytes == (0, 30, 0, 20)
    assert (first.requested_peak_bytes, second.requested_peak_bytes) == (60, 40)
    assert second.workspace_bytes == (0, 0, 0, 0)


def test_a_profile_without_nodes_has_no_runs(tmp_path: Path) -> None:
    assert profile_of([], tmp_path) == []


def test_each_provider_has_a_separate_arena(tmp_path: Path) -> None:
    """Nodes of another provider report that provider's arena, which is not part of the peak."""
    nodes = [
        ("shape", 7000, 50, 7000, 9000),
        ("a", 110, 10, 110, 150, "GPU"),
        ("shape2", 8000, 1000, 8000, 9000),
        ("b", 130, 20, 130, 150, "GPU"),
    ]
    (run,) = profile_of([nodes], tmp_path, "GPU")
    assert run.order == ("shape", "a", "shape2", "b")
    assert run.held_bytes == (0, 10, 10, 30)
    assert run.workspace_bytes == (0, 0, 0, 0)
    (nothing,) = profile_of([nodes], tmp_path, "TPU")
    assert nothing.requested_peak_bytes == 0


def test_outputs_that_stay_allocated_can_be_excluded() -> None:
    run = RunProfile(("a", "b", "c"), (1, 1, 1), (10, 30, 25), (10, 30, 25), (0, 5, 0), 1.0, {})
    assert run.requested_peak_bytes == 35
    assert run.requested_peak_without({"b": 20}) == 15
    assert run.requested_peak_without({"a": 10, "c": 1}) == 25
