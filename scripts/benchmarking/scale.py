"""Processor seconds and memory of `onnxgc` on huge graphs, light or with sparse external weights.

Each command runs in a process of its own, with its children.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

from scripts.benchmarking.records import Progress, Record
from scripts.benchmarking.tables import markdown_table
from scripts.networks.builder import Builder
from scripts.networks.llama import LLAMA_8B, LLAMA_70B, Llama, llama
from scripts.networks.residual import resnet

_OPSET, _IR_VERSION = 17, 9
_NODES_OF_BOTTLENECK = 10
DATA_FILE = "weights.bin"


def llama_model(sizes: Llama) -> onnx.ModelProto:
    """Tokens [1, tokens] to logits, at sequence length `sizes.tokens`."""
    net = Builder()
    llama(net, "x", sizes)
    return _model(net, TensorProto.INT64, [1, sizes.tokens], [1, sizes.tokens, sizes.vocabulary])


def chain_model(operators: int) -> onnx.ModelProto:
    """A chain of linear layers and activations."""
    net, x = Builder(), "x"
    for index in range(operators // 2):
        x = net.relu(net.linear(x, f"fc{index}", (8, 8)), f"relu{index}")
    return _model(net, TensorProto.FLOAT, [2, 8], [2, 8])


def resnet_model(operators: int) -> onnx.ModelProto:
    """A ResNet with bottlenecks, almost all in the third stage."""
    net = Builder()
    resnet(net, "x", (3, 4, max(operators // _NODES_OF_BOTTLENECK - 10, 1), 3), bottleneck=True)
    return _model(net, TensorProto.FLOAT, [1, 3, 64, 64], [1, 1000])


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{f"chain, {n:,}": partial(chain_model, n) for n in (6_250, 12_500, 25_000, 50_000)},
    **{f"ResNet, {n:,}": partial(resnet_model, n) for n in (6_250, 12_500, 25_000, 50_000)},
    **{f"Llama-70B, {n} layers": partial(llama_model, replace(LLAMA_70B, layers=n)) for n in (10, 20, 40, 80)},
    "Llama-8B": partial(llama_model, LLAMA_8B),
}
_LARGEST = ("chain, 50,000", "ResNet, 50,000", "Llama-70B, 80 layers")
_PLAN = "optimize --dry-run --no-check"
COMMANDS: tuple[tuple[str, bool, str], ...] = (
    *((name, False, _PLAN) for name in MODELS),
    *((name, False, "inspect") for name in _LARGEST),
    ("Llama-70B, 80 layers", False, "optimize --dry-run --extra-time 20%"),
    ("Llama-70B, 80 layers", True, "inspect"),
    ("Llama-70B, 80 layers", True, "optimize"),
    ("Llama-70B, 80 layers", True, "optimize --weights reference"),
    ("Llama-8B", True, "optimize"),
)
"""Model, whether its weights are external, and command."""


@dataclass(frozen=True, slots=True)
class Options:
    """Models whose name contains `only`; the others keep their recorded figures."""

    only: str = ""


def run(options: Options, progress: Progress) -> dict[str, Any]:
    known = {
        (row["model"], row["external"], row["command"]): row for row in (progress.recorded() or {"runs": []})["runs"]
    }
    for name, is_external, command in COMMANDS:
        if options.only in name:
            progress(f"{name}: {command}")
            known[name, is_external, command] = _measured(name, is_external, command)
    return {"runs": [known[key] for key in COMMANDS if key in known]}


def _measured(name: str, is_external: bool, command: str) -> dict[str, Any]:
    verb, *options = command.split()
    with tempfile.TemporaryDirectory() as folder:
        # A child's memory counts that of its parent before it starts.
        with ProcessPoolExecutor(1) as processes:
            path = processes.submit(_written, name, folder, is_external).result()
        output = [] if verb == "inspect" or "--dry-run" in options else [path + "-training.onnx"]
        given = [verb, path, *output, *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "onnxgc", *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        text = process.stdout.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "model": name,
        "external": is_external,
        "command": command,
        "seconds": usage.ru_utime + usage.ru_stime,
        "mebibytes": usage.ru_maxrss >> 10,
        "error": text.strip().splitlines()[-1] if code else "",
    }


def _written(name: str, folder: str, is_external: bool) -> str:
    return str(write(MODELS[name](), Path(folder), is_external=is_external))


def failures(figures: Any) -> list[str]:
    return [f"{row['model']}: {row['command']}: {row['error']}" for row in figures["runs"] if row["error"]]


def results_section(record: Record) -> str:
    rows = [
        [
            row["model"] + (", external weights" if row["external"] else ""),
            f"`{row['command']}`",
            f"{row['seconds']:.0f}",
            f"{row['mebibytes']:,}",
        ]
        for row in record["figures"]["runs"]
    ]
    table = markdown_table(["model", "command", "CPU s", "MiB"], rows)
    return (
        "**Scale.** Whole runs of the command, children included; chains and ResNets by number of operators, Llama at "
        f"2,048 tokens. External weights are files of holes: 282 GB of Llama-70B, 32 GB of Llama-8B.\n\n{table}"
    )


def write(model: onnx.ModelProto, folder: Path, *, is_external: bool = False) -> Path:
    """Writes a light model; or with its parameters as external data in a file of holes."""
    if is_external:
        _move_to_external(model, folder)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _move_to_external(model: onnx.ModelProto, folder: Path) -> None:
    graph = model.graph
    shapes = {
        tensor.name: numpy_helper.to_array(tensor).tolist()
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.INT64
    }
    filled = [node for node in graph.node if node.op_type == "ConstantOfShape"]
    kept = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    offset = 0
    for node in filled:
        tensor = graph.initializer.add(name=node.output[0], data_type=TensorProto.FLOAT, dims=shapes[node.input[0]])
        tensor.data_location = TensorProto.EXTERNAL
        size = 4
        for dimension in tensor.dims:
            size *= dimension
        for key, value in {"location": DATA_FILE, "offset": offset, "length": size}.items():
            tensor.external_data.add(key=key, value=str(value))
        offset += -(-size // 4096) * 4096
    with open(folder / DATA_FILE, "wb") as file:
        file.truncate(offset)
    del graph.node[:]
    graph.node.extend(kept)


def _model(net: Builder, kind: int, given: list[int], result: list[int]) -> onnx.ModelProto:
    net.nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        net.parameters + net.nodes,
        "huge",
        [helper.make_tensor_value_info("x", kind, given)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, result)],
        initializer=list(net.initializers.values()),
    )
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(graph, ir_version=_IR_VERSION, opset_imports=[opset])
