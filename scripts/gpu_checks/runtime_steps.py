"""Steps on the runtime itself: libraries, fallbacks to the CPU, executed order, and exchange of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.model.core.ir import Array
from onnxgc.runtime.ort import load_onnxruntime
from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.device import load_libraries, session_on
from scripts.gpu_checks.profile_reports import (
    barrier_report,
    counts_line,
    fallback_report,
    node_events,
    order_report,
)
from scripts.gpu_checks.settings import SEED, Json, device_of
from scripts.gpu_checks.training_files import GRAPHS, PLANNED, Recipe

MAX_MATMUL_ERROR = 1e-2
MATMUL = """<ir_version: 9, opset_import: ["": 18]>
matmul (float[64, 64] a, float[64, 64] b) => (float[64, 64] c) { c = MatMul(a, b) }"""
UPDATE = """<ir_version: 9, opset_import: ["": 18]>
update (float[1024] w, float[1024] g, float lr) => (float[1024] w_new) {
    scaled = Mul(g, lr)
    w_new = Sub(w, scaled)
}"""


def runtime_step(check: Check) -> Finding:
    """The CUDA build of ONNX Runtime loads, finds its libraries and runs a MatMul on the card."""
    answer = check.worker("load", {})
    matmul = answer["matmul"]
    holds = matmul["provider"] == check.options.provider and matmul["largest_error"] < MAX_MATMUL_ERROR
    line = (
        f"onnxruntime {answer['onnxruntime']}, libraries by {answer['libraries']['found_by']}, "
        f"MatMul on {matmul['provider']}, error {matmul['largest_error']:.1e}"
    )
    return Finding(holds, line, answer)


def fallback_step(check: Check) -> Finding:
    """Operators off the card and copies; the step reports them and never fails."""
    network, provider = check.options.paper_networks[0], check.options.provider
    runs = {graph: check.measured(Recipe(network), graph).steady for graph in GRAPHS}
    reports = {graph: fallback_report(events, provider) for graph, events in runs.items()}
    planned = reports[PLANNED]
    line = (
        f"{network.name} planned: {planned['nodes']} nodes, "
        f"compute elsewhere {counts_line(planned['compute_elsewhere'])}, "
        f"shape arithmetic elsewhere {counts_line(planned['shape_arithmetic_elsewhere'])}, "
        f"copies {counts_line(planned['copies'])}, of data {counts_line(planned['copies_of_data'])}"
    )
    return Finding(True, line, {"network": network.name, **reports})


def order_step(check: Check) -> Finding:
    """Executed order against the schedule, and the cost of barriers."""
    network = check.options.paper_networks[0]
    reports: dict[str, Json] = {}
    for graph in GRAPHS:
        model = check.files(Recipe(network)).model(graph)
        events = check.measured(Recipe(network), graph).steady
        reports[graph] = {**order_report(model, events), "barriers": barrier_report(model, events)}
    planned = reports[PLANNED]
    barriers = planned["barriers"]
    copies = sum(barriers["copies_beside"].values())
    line = (
        f"{network.name} planned: {planned['executed']} nodes, late {planned['late']['count']}, "
        f"lost {planned['lost_recomputed']['count']} of {planned['recomputed']} recomputed, "
        f"unknown {planned['unknown']['count']}; {barriers['executed']} barrier nodes take "
        f"{barriers['host_time_share']:.1%} of host time, with {copies} adjacent copies"
    )
    holds = all(report["equals_schedule"] for report in reports.values())
    return Finding(holds, line, {"network": network.name, **reports})


def exchange_step(check: Check) -> Finding:
    """In-place updates through IO binding, and DLPack exchange with torch without a copy."""
    answer = check.worker("exchange", {})
    facts = {name: value for name, value in answer.items() if isinstance(value, bool)}
    line = ", ".join(f"{name.replace('_', ' ')} {'yes' if holds else 'NO'}" for name, holds in facts.items())
    return Finding(all(facts.values()), line, answer)


def work_load(request: Json, folder: Path) -> Json:
    """Libraries, provider and a MatMul."""
    libraries = load_libraries(request["provider"])
    ort = load_onnxruntime()
    session = session_on(onnx.parser.parse_model(MATMUL), request, folder / "profile")
    a, b = np.random.default_rng(SEED).standard_normal((2, 64, 64)).astype(np.float32)
    (c,) = session.run(None, {"a": a, "b": b})
    events = node_events(Path(session.end_profiling()))[0]
    (matmul,) = (event for event in events if event.operator in ("MatMul", "Gemm", "FusedMatMul"))
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return {
        "onnxruntime": ort.__version__,
        "available_providers": ort.get_available_providers(),
        "session_providers": session.get_providers(),
        "libraries": libraries,
        "matmul": {
            "provider": matmul.provider,
            "largest_error": float(np.abs(c - expected).max() / np.abs(expected).max()),
        },
    }


def work_exchange(request: Json, folder: Path) -> Json:
    """A tensor as input and output, and tensors shared with torch."""
    provider, device = request["provider"], device_of(request["provider"])
    load_libraries(provider)
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
    return {**answer, "torch": torch.__version__, "session_providers": session.get_providers()}
