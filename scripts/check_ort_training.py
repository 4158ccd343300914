"""Compares training files on onnxruntime-training 1.19.2 with the installed ONNX Runtime.

    python scripts/check_ort_training.py INTERPRETER [MODEL ...]

INTERPRETER is a Python 3.8 to 3.11 with onnxruntime-training 1.19.2 and numpy. MODELs are forward models
(by default some of models/). Each is planned, with gradients and with SGD. The file runs on both runtimes
with the same inputs and default session settings; the other runtime has only basic optimisations, since
higher levels rename nodes. Each output must agree up to rounding, and each recomputed node must run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onnxgc.api import optimize  # noqa: E402
from onnxgc.api.feeds import feeds_of, feeds_of_updates  # noqa: E402
from onnxgc.model.draw_weights import draw_weights  # noqa: E402
from onnxgc.model.read import read_model  # noqa: E402
from onnxgc.runtime.ort import load_onnxruntime  # noqa: E402
from onnxgc.tracing.optimizers import SGD  # noqa: E402

TOLERANCE, MEDIAN_TOLERANCE = 5e-2, 1e-3
"""Relative distances. Rounding may move a value across a kink of an activation, and change one gradient."""
_VANISHING = 1e-4
"""Outputs below this share of the largest are compared relative to the share."""
MODELS = {
    "resnet18": {"x": (2, 3, 64, 64)},
    "mobilenet_v2": {"x": (4, 3, 96, 96)},
    "densenet121": {"x": (4, 3, 128, 128)},
}
# The program of the other interpreter, which has no access to this project.
RUNNER = """
import json, sys
import numpy, onnxruntime
folder = sys.argv[1]
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
options.enable_profiling = True
options.profile_file_prefix = folder + "/profile"
session = onnxruntime.InferenceSession(folder + "/training.onnx", options, providers=["CPUExecutionProvider"])
feeds = dict(numpy.load(folder + "/feeds.npz"))
names = [output.name for output in session.get_outputs()]
results = session.run(names, feeds)
numpy.savez(folder + "/results.npz", *results)
events = json.load(open(session.end_profiling()))
ran = [event["name"][:-12] for event in events if event.get("name", "").endswith("_kernel_time")]
json.dump({"version": onnxruntime.__version__, "ran": ran}, open(folder + "/ran.json", "w"))
"""


def main() -> int:
    """Exit code 1: a file does not run, or its results differ."""
    interpreter, *given = sys.argv[1:]
    models: dict[Path, Mapping[str, tuple[int, ...]]] = {
        ROOT / "models" / f"{name}.onnx": shapes for name, shapes in MODELS.items()
    }
    failed = 0
    if given:
        models = {Path(name): {} for name in given}
    for path, shapes in models.items():
        for optimizer in (None, SGD(momentum=0.9)):
            line = checked(interpreter, path, shapes, optimizer)
            failed += line.startswith("FAILS")
            print(f"{path.name}, {'gradients' if optimizer is None else optimizer.name}: {line}", flush=True)
    return 1 if failed else 0


def checked(
    interpreter: str, path: Path, shapes: Mapping[str, tuple[int, ...]], optimizer: SGD | None
) -> str:
    """One line about a training file."""
    weights = draw_weights(read_model(path, input_shapes=shapes), 0, only_constant_filled=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.onnx"
        result = optimize(path, file, input_shapes=shapes, optimizer=optimizer, values=weights, check=False)
        stored = {name: weight.load() for name, weight in result.planned.model.weights.items()}
        feeds = feeds_of(result.planned, 0) | feeds_of_updates(result.planned, stored | weights, 0)
        np.savez(Path(folder) / "feeds.npz", **feeds)  # type: ignore[arg-type]
        (Path(folder) / "runner.py").write_text(RUNNER, encoding="utf-8")
        ran = subprocess.run(
            [interpreter, f"{folder}/runner.py", folder], capture_output=True, text=True, cwd=folder
        )
        if ran.returncode:
            return f"FAILS: {(ran.stderr.strip().splitlines() or ['no message'])[-1]}"
        answer = json.loads((Path(folder) / "ran.json").read_text(encoding="utf-8"))
        with np.load(Path(folder) / "results.npz") as stored:
            theirs = [stored[name] for name in stored.files]
        options = load_onnxruntime().SessionOptions()
        options.log_severity_level = 3
        session = load_onnxruntime().InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        ours = session.run(None, feeds)
        least = _VANISHING * max(map(_norm, ours))
        distances = [
            _norm(one - other) / max(_norm(one), least) for one, other in zip(ours, theirs, strict=True)
        ]
        far = sum(distance > TOLERANCE for distance in distances)
        recomputed = [node.name for node in onnx.load(file).graph.node if _is_recomputed(node)]
        lost = set(recomputed) - set(answer["ran"])
    line = (
        f"onnxruntime-training {answer['version']}, {len(ours) - far} of {len(ours)} outputs agree (median "
        f"distance {np.median(distances):.1e}), {len(recomputed) - len(lost)} of {len(recomputed)} "
        f"recomputed nodes ran{', not ' + min(lost) if lost else ''}"
    )
    is_wrong = far or lost or np.median(distances) > MEDIAN_TOLERANCE
    return f"FAILS: {line}" if is_wrong else line


def _norm(values: Any) -> float:
    return float(np.linalg.norm(np.asarray(values, np.float64)))


def _is_recomputed(node: onnx.NodeProto) -> bool:
    """Whether a node is a copy of a node of the model; equal barriers may be merged."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    return bool(notes["onnxgc.role"] == "recompute" and notes["onnxgc.node"] != node.name)


if __name__ == "__main__":
    sys.exit(main())
