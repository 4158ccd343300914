"""The contract of a training file as JSON: all that a program must know to feed and read it.

docs/training-file.md describes it, docs/training-contract.schema.json is its JSON schema.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import onnx

from onnxgc.model.core.ir import dtype_name

CONTRACT_SCHEMA = 1
CONTRACT_KEY = "onnxgc.contract"
"""The key of the contract in the metadata of a state file."""
UPDATES_KEY = "onnxgc.updates"
"""The key of the number of updates so far, as text; absent before the first."""
_SCALARS = ("learning_rate", "step", "draw", "keep", "loss_scale", "barrier_zero")
_NAMED = ("loss", "labels", "target", "learning_rate", "step", "draw", "gradient_norm")


def contract_of(model: onnx.ModelProto, evaluation: onnx.ModelProto | None = None) -> dict[str, Any]:
    """The contract of a training file, and of the evaluation file that belongs to it."""
    names = _names(model)
    pairs = {**names.get("parameters", {}), **names.get("states", {}), **names["statistics"]}
    inputs = {value.name for value in model.graph.input}
    pairs = {old: new for old, new in pairs.items() if old in inputs}
    roles = _roles(names)
    stored = {tensor.name for tensor in model.graph.initializer}
    outputs = _described(model.graph.output, roles, "output")
    # The model's own output may be the loss.
    outputs[names["loss"]]["role"] = "loss"
    contract = {
        "schema": CONTRACT_SCHEMA,
        "inputs": {
            name: {**about, "required": name not in stored}
            for name, about in _described(model.graph.input, roles, "input").items()
        },
        "outputs": outputs,
        "batch": [value.name for value in model.graph.input if roles.get(value.name, "labels") == "labels"],
        "pairs": pairs,
        "gradients": names["gradients"],
        **{key: names[key] for key in _NAMED if key in names},
    }
    if evaluation is not None:
        named = _names(evaluation)
        shown = [value.name for value in evaluation.graph.output if value.name != named["loss"]]
        fed = [value.name for value in evaluation.graph.input]
        contract["evaluation"] = {"inputs": fed, "loss": named["loss"], "outputs": shown}
    return contract


def contract_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The contract in a state file's metadata.

    Raises:
        KeyError: there is none.
        ValueError: it is not JSON, or of another schema.
    """
    found = json.loads(metadata[CONTRACT_KEY])
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != CONTRACT_SCHEMA:
        raise ValueError(f"its contract has the schema {schema}, and this version reads {CONTRACT_SCHEMA}")
    return dict(found)


def _names(model: onnx.ModelProto) -> dict[str, Any]:
    found: dict[str, Any] = json.loads({entry.key: entry.value for entry in model.metadata_props}["onnxgc.names"])
    return found


def _roles(names: Mapping[str, Any]) -> dict[str, str]:
    """The role of each input and output that is not one of the model's own."""
    roles = {names[key]: key for key in (*_SCALARS, "gradient_norm") if key in names}
    roles |= {names[key]: "labels" for key in ("labels", "target") if key in names}
    for role, key in (("parameter", "parameters"), ("state", "states"), ("statistic", "statistics")):
        for old, new in names.get(key, {}).items():
            roles |= {old: role, new: role}
    for name in names.get("states_of", ()):
        roles[name] = "parameter"
    for name, gradient in names["gradients"].items():
        roles |= {name: "parameter", gradient: "gradient"}
    return roles


def _described(
    values: Iterable[onnx.ValueInfoProto], roles: Mapping[str, str], other: str
) -> dict[str, dict[str, Any]]:
    return {
        value.name: {
            "role": roles.get(value.name, other),
            "type": dtype_name(value.type.tensor_type.elem_type),
            "shape": [dim.dim_value for dim in value.type.tensor_type.shape.dim],
        }
        for value in values
    }
