"""Trains the digits with NumPy and ONNX Runtime alone: python docs/examples/train.py [FOLDER]."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

TYPES = {"F32": np.float32, "I64": np.int64}


def read(path):
    """The arrays and the metadata of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", {})
    arrays = {}
    for name, about in header.items():
        first, last = (start + offset for offset in about["data_offsets"])
        arrays[name] = np.frombuffer(content[first:last], TYPES[about["dtype"]]).reshape(about["shape"])
    return arrays, metadata


def session_of(path):
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main(folder, epochs=3):
    state, metadata = read(folder / "digits-training.safetensors")
    contract = json.loads(metadata["onnxgc.contract"])
    data, _ = read(folder / "digits-data.safetensors")
    session, pairs = session_of(folder / "digits-training.onnx"), contract["pairs"]
    size = contract["inputs"]["x"]["shape"][0]
    starts = [*range(0, len(data["x"]), size)] * epochs
    for updates, first in enumerate(starts):
        batch = {name: data[name][first : first + size] for name in contract["batch"]}
        numbers = {"learning_rate": np.float32(0.003), "step": np.int64(updates + 1), "draw": np.int64(updates)}
        fed = {contract[role]: np.asarray(value) for role, value in numbers.items() if role in contract}
        loss, *new = session.run([contract["loss"], *pairs.values()], {**state, **batch, **fed})
        state = dict(zip(pairs, new, strict=True))
        print(repr(float(loss)))
    evaluation, right = session_of(folder / "digits-evaluation.onnx"), 0
    weights = {name: state[name] for name in contract["evaluation"]["inputs"] if name in state}
    for first in range(0, len(data["x_test"]), size):
        batch = {name: data[f"{name}_test"][first : first + size] for name in contract["batch"]}
        scores = evaluation.run(contract["evaluation"]["outputs"], {**weights, **batch})[0]
        right += int((scores.argmax(1) == batch["labels"]).sum())
    print("accuracy", right / len(data["x_test"]))


main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
