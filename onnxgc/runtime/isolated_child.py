"""The child process of `runtime.isolated_run`: loads one model in ONNX Runtime and runs it.

    python isolated_child.py FOLDER

It imports only NumPy and ONNX Runtime, not this package, to start fast for every planned model. FOLDER
contains `request.json` and `feeds.npz` and receives `answer.json`. The process ends when its standard
input closes, that is, when the parent has ended.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

# This file's folder contains modules whose names shadow others.
if sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    del sys.path[0]

_FATAL_ONLY = 4
_KERNEL = "_kernel_time"


def _end_with_parent() -> None:
    # sys.stdin would hold its lock when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


class _SessionAttempts:
    """Tries sessions of one model at increasing optimisation levels until one loads and runs it."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        self._ort = onnxruntime
        self._folder = folder
        self._request: dict[str, Any] = json.loads((folder / "request.json").read_text())
        self._errors: list[str] = []

    def _write_answer(self, **more: Any) -> None:
        """Writes the answer so far, so that it survives a crash."""
        answer = {"errors": self._errors, **more}
        (self._folder / "answer.json").write_text(json.dumps(answer))

    def run(self) -> None:
        for level in self._request["levels"]:
            self._write_answer(level=level, stage="load")
            try:
                nodes = self._attempt(level)
            except MemoryError:
                self._errors.append("std::bad_alloc")
            except Exception as error:  # ONNX Runtime's exceptions have no common base class.
                self._errors.append(str(error) or type(error).__name__)
            else:
                self._write_answer(level=level, stage="end", nodes=nodes)
                return
        self._write_answer(stage="end")

    def _attempt(self, level: str) -> list[list[Any]]:
        options = self._ort.SessionOptions()
        options.log_severity_level = _FATAL_ONLY
        options.enable_mem_pattern = False
        # A prepacked copy of the weights does not pay off for one run.
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = getattr(self._ort.GraphOptimizationLevel, level)
        if self._request["threads"]:
            options.intra_op_num_threads = self._request["threads"]
        if self._request["data_folder"]:
            key = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(key, self._request["data_folder"])
        options.enable_profiling = bool(self._request["run"])
        options.profile_file_prefix = str(self._folder / "profile")
        model: Any = self._request["model"]
        if self._request["data_folder"]:
            model = Path(model).read_bytes()
        session = self._ort.InferenceSession(model, options, providers=self._request["providers"])
        if not self._request["run"]:
            return []
        self._write_answer(level=level, stage="run")
        session.run(None, self._feeds())
        return self._nodes(session.end_profiling())

    def _feeds(self) -> dict[str, Any]:
        import numpy as np

        with np.load(self._folder / "feeds.npz") as stored:
            arrays = [stored[f"arr_{index}"] for index in range(len(self._request["feeds"]))]
        feeds: dict[str, Any] = {}
        for (name, kind), array in zip(self._request["feeds"], arrays, strict=True):
            # Types that NumPy lacks are stored as bits.
            make = self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type
            feeds[name] = array if kind is None else make(array, kind)
        return feeds

    @staticmethod
    def _nodes(profile: str) -> list[list[Any]]:
        """Index, operator, name, and output types and shapes of each executed node."""
        events = json.loads(Path(profile).read_text())
        return [
            [
                int(event["args"]["node_index"]),
                event["args"].get("op_name", ""),
                event["name"].removesuffix(_KERNEL),
                event["args"].get("output_type_shape", []),
            ]
            for event in events
            if event.get("cat") == "Node" and event.get("name", "").endswith(_KERNEL)
        ]


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _SessionAttempts(Path(sys.argv[1])).run()
    # Releasing the session may crash.
    os._exit(0)
