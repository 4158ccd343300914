"""What `runtime.isolated_run` starts: it loads one model in ONNX Runtime and runs it, away from its caller.

    python child.py FOLDER

It imports NumPy and ONNX Runtime alone, since it starts for every model that is planned; so it takes
nothing of this package. FOLDER holds `request.json` and `feeds.npz`, and receives `answer.json`. The
process ends as soon as its standard input does: whoever started it is gone then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

# The folder of this file has modules by the names of others.
if sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    del sys.path[0]

_FATAL_ONLY = 4
_KERNEL = "_kernel_time"


def _end_with_the_caller() -> None:
    # Not by sys.stdin, whose lock would still be held when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


class _Attempts:
    """Sessions of one model, from the plainest settings on, until one takes it."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        self._ort = onnxruntime
        self._folder = folder
        self._request: dict[str, Any] = json.loads((folder / "request.json").read_text())
        self._errors: list[str] = []

    def _tell(self, **more: Any) -> None:
        """Writes the answer as far as it is known: a crash must not take it along."""
        answer = {"errors": self._errors, **more}
        (self._folder / "answer.json").write_text(json.dumps(answer))

    def run(self) -> None:
        for level in self._request["levels"]:
            self._tell(level=level, stage="load")
            try:
                nodes = self._attempt(level)
            except MemoryError:
                self._errors.append("std::bad_alloc")
            except Exception as error:  # ONNX Runtime's exceptions have no base class of their own.
                self._errors.append(str(error) or type(error).__name__)
            else:
                self._tell(level=level, stage="end", nodes=nodes)
                return
        self._tell(stage="end")

    def _attempt(self, level: str) -> list[list[Any]]:
        options = self._ort.SessionOptions()
        options.log_severity_level = _FATAL_ONLY
        options.enable_mem_pattern = False
        # For one run no weight is worth a second copy in the form that its kernel likes best.
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
        self._tell(level=level, stage="run")
        session.run(None, self._feeds())
        return self._nodes(session.end_profiling())

    def _feeds(self) -> dict[str, Any]:
        import numpy as np

        with np.load(self._folder / "feeds.npz") as stored:
            arrays = [stored[f"arr_{index}"] for index in range(len(self._request["feeds"]))]
        feeds: dict[str, Any] = {}
        for (name, kind), array in zip(self._request["feeds"], arrays, strict=True):
            # A type that NumPy does not have comes as its bits.
            make = self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type
            feeds[name] = array if kind is None else make(array, kind)
        return feeds

    @staticmethod
    def _nodes(profile: str) -> list[list[Any]]:
        """By node that ran: its index, operator, name and the types and shapes of its outputs."""
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
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    _Attempts(Path(sys.argv[1])).run()
    # Nothing is left to do, and a session that is taken down may crash.
    os._exit(0)
