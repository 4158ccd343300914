"""Work on the runtime itself: a MatMul on the card, and exchange of memory with torch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.model.core.ir import Array
from onnxgc.runtime.ort import load_onnxruntime
from scripts.gpu_checks.device import session_on
from scripts.gpu_checks.profile_reports import node_events
from scripts.gpu_checks.settings import SEED, Json, device_of

MAX_MATMUL_ERROR = 1e-2
MATMUL = """<ir_version: 9, opset_import: ["": 18]>
matmul (float[64, 64] a, float[64, 64] b) => (float[64, 64] c) { c = MatMul(a, b) }"""
UPDATE = """<ir_version: 9, opset_import: ["": 18]>
update (float[1024] w, float[1024] g, float lr) => (float[1024] w_new) {
    scaled = Mul(g, lr)
    w_new = Sub(w, scaled)
}"""


def work_load(request: Json, folder: Path) -> Json:
    """Provider and accuracy of a MatMul."""
    ort = load_onnxruntime()
    session = session_on(onnx.parser.parse_model(MATMUL), request, folder / "profile")
    a, b = np.random.default_rng(SEED).standard_normal((2, 64, 64)).astype(np.float32)
    (c,) = session.run(None, {"a": a, "b": b})
    events = node_events(Path(session.end_profiling()))[0]
    (matmul,) = (event for event in events if event.operator in ("MatMul", "Gemm", "FusedMatMul"))
    expected = a.astype(np.float64) @ b.astype(np.float64)
    error = float(np.abs(c - expected).max() / np.abs(expected).max())
    holds = matmul.provider == request["provider"] and error < MAX_MATMUL_ERROR
    return {
        "status": "held" if holds else "not held",
        "onnxruntime": ort.__version__,
        "matmul_provider": matmul.provider,
        "matmul_error": error,
    }


def work_exchange(request: Json, folder: Path) -> Json:
    """A tensor as input and output, and tensors shared with torch."""
    device = device_of(request["provider"])
    import torch

    ort = load_onnxruntime()
    session = session_on(onnx.parser.parse_model(UPDATE), request)
    w, g = np.random.default_rng(SEED).standard_normal((2, 1024)).astype(np.float32)
    lr = np.asarray(0.5, np.float32)

    def update(weight: Any, gradient: Any) -> None:
        binding = session.io_binding()
        for name, value in (("w", weight), ("g", gradient), ("lr", on_device(lr))):
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("w_new", weight)
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    def on_device(value: Array) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(value.copy(), device, 0)

    expected = w - g * lr
    weight, gradient = on_device(w), on_device(g)
    pointer = weight.data_ptr()
    update(weight, gradient)
    answer: Json = {
        "in_place_same_pointer": weight.data_ptr() == pointer,
        "in_place_values_right": bool(np.allclose(weight.numpy(), expected, rtol=1e-6, atol=1e-6)),
    }
    seen = torch.from_dlpack(weight)  # type: ignore[attr-defined]
    answer["onnxruntime_to_torch_same_pointer"] = seen.data_ptr() == pointer
    answer["onnxruntime_to_torch_same_device"] = seen.device.type == device
    owned = torch.from_numpy(w.copy()).to(device)
    shared = ort.OrtValue.from_dlpack(owned)
    answer["torch_to_onnxruntime_same_pointer"] = shared.data_ptr() == owned.data_ptr()
    answer["torch_to_onnxruntime_same_device"] = shared.device_name() == device
    update(shared, gradient)
    answer["torch_sees_update"] = bool(np.allclose(owned.cpu().numpy(), expected, rtol=1e-6, atol=1e-6))
    return {"status": "held" if all(answer.values()) else "not held", **answer}
