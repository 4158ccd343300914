"""Plans as JSON, in plan files and in the metadata of training files."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from onnxgc import __version__
from onnxgc.emission.atomic_files import write_text
from onnxgc.errors import PlanError
from onnxgc.planning.plan import CheckpointPlan

PLAN_SCHEMA = 1
METADATA_KEY = "onnxgc.plan"
# Earlier names: `w/update/w/update/Mul`, `w/update/w_new`.
_EARLIER_UPDATE = re.compile(r"^(.+)/update/\1(/update/|_)(.+)$")
_HEAD_BYTES = 64
_REMEDY = "write a new one with `onnxgc optimize`"


def plan_as_json(plan: CheckpointPlan, solver: str) -> dict[str, Any]:
    """A plan for plan files and the metadata of training files; docs/training-file.md lists the keys."""
    return {
        "schema": PLAN_SCHEMA,
        "solver": solver,
        "checkpoints": list(plan.checkpoints),
        "order": list(plan.order),
        "keeps_last_segment": plan.keeps_last_segment,
        **({"sequence": list(plan.sequence)} if plan.sequence else {}),
    }


def write_plan(plan: CheckpointPlan, path: str | os.PathLike[str], *, solver: str, model: str = "") -> None:
    """Writes a plan to a JSON file; `model` is the file of the model that it is for.

    Raises:
        OutputFileError: the file cannot be written.
    """
    head = {"kind": METADATA_KEY, "onnxgc": __version__, "model": model}
    write_text(json.dumps({**head, **plan_as_json(plan, solver)}, indent=1) + "\n", path)


def plan_from_json(found: Any, where: str) -> CheckpointPlan:
    """The plan of a value that `plan_as_json` returned; messages call the value `where`.

    Raises:
        PlanError: `found` is not a plan, or has another schema.
    """
    try:
        schema = int(found["schema"])
        if schema != PLAN_SCHEMA:
            raise PlanError(f"{where} has schema {schema}, but this onnxgc reads {PLAN_SCHEMA}; {_REMEDY}")
        names = [_names(found.get(key, [])) for key in ("checkpoints", "order", "sequence")]
        sequence = tuple(_EARLIER_UPDATE.sub(r"\1/update/\3", name) for name in names[2])
        return CheckpointPlan(names[0], names[1], bool(found["keeps_last_segment"]), sequence)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise PlanError(f"{where} is not a valid plan: missing or invalid {error}; {_REMEDY}") from error


def is_plan_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a plan file, not a model."""
    try:
        with open(path, "rb") as file:
            if not file.read(_HEAD_BYTES).lstrip().startswith(b"{"):
                return False
            file.seek(0)
            return bool(json.load(file).get("kind") == METADATA_KEY)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def model_of(source: Any) -> str:
    """The model that a plan file names, or ""."""
    if not isinstance(source, str | os.PathLike) or not is_plan_file(source):
        return ""
    with open(source, "rb") as file:
        return str(json.load(file).get("model", ""))


def plan_of(source: Any) -> CheckpointPlan:
    """The plan in `source`.

    `source` is a plan, the result of `onnxgc.optimize`, the path of a plan file or training file, a loaded
    training file, a plan's JSON object, or the names of the tensors to keep.

    Raises:
        PlanError: `source` contains no plan.

    >>> plan_of(["conv1", "conv2"]).checkpoints
    ('conv1', 'conv2')
    """
    if isinstance(source, CheckpointPlan):
        return source
    if isinstance(plan := getattr(source, "plan", None), CheckpointPlan):
        return plan
    if isinstance(source, Mapping):
        return plan_from_json(source, "the plan")
    if isinstance(source, str | os.PathLike):
        return _read(os.fspath(source))
    if isinstance(source, onnx.ModelProto):
        return _of_training_file(source, f"model '{source.graph.name}'")
    if isinstance(source, Sequence) and all(isinstance(name, str) for name in source):
        return CheckpointPlan(tuple(source))
    raise PlanError(
        f"a {type(source).__name__} is not a plan; "
        "pass the result of onnxgc.optimize, the path of a plan file or training file, or names of tensors"
    )


def _read(path: str) -> CheckpointPlan:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"cannot read the plan '{path}': {reason}") from error
    if not content:
        raise PlanError(f"'{path}' is empty (0 bytes); {_REMEDY}")
    try:
        return plan_from_json(json.loads(content), f"'{path}'")
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        pass
    try:
        proto = onnx.load_model_from_string(content)
    except Exception as error:
        raise PlanError(f"'{path}' is neither a plan file nor a training file; {_REMEDY}") from error
    return _of_training_file(proto, f"'{path}'")


def _of_training_file(proto: onnx.ModelProto, where: str) -> CheckpointPlan:
    found = next((entry.value for entry in proto.metadata_props if entry.key == METADATA_KEY), None)
    if found is None:
        raise PlanError(f"{where} is a model without a plan; pass the training file that `optimize` wrote")
    try:
        return plan_from_json(json.loads(found), where)
    except json.JSONDecodeError as error:
        raise PlanError(f"{where} has no valid plan: its metadata is corrupt; {_REMEDY}") from error


def _names(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError("list of names")
    return tuple(found)
