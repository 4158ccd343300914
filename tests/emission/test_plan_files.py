import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from onnxgc.emission.plan_files import METADATA_KEY, plan_as_json, plan_from_json, plan_of, write_plan
from onnxgc.errors import OutputFileError, PlanError
from onnxgc.planning.plan import CheckpointPlan

PLANS = (
    CheckpointPlan(("a", "b")),
    CheckpointPlan((), keeps_last_segment=False),
    CheckpointPlan(("b", "ü<b>"), order=("b", "ü<b>", "c")),
    CheckpointPlan(("a",), sequence=("f", "g", "f", "back"), keeps_last_segment=False),
)


def training_file(text: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]> g (float[1] x) => (float[1] x) {}')
    proto.metadata_props.add(key=METADATA_KEY, value=text)
    return proto


@pytest.mark.parametrize("plan", PLANS)
def test_every_form_of_a_plan_reads_as_the_same_plan(plan: CheckpointPlan, tmp_path: Path):
    as_json = plan_as_json(plan, "peak")
    write_plan(plan, tmp_path / "plan.json", solver="peak", model="model.onnx")
    proto = training_file(json.dumps(as_json))
    onnx.save(proto, tmp_path / "training.onnx")
    forms: list[Any] = [
        plan,
        SimpleNamespace(plan=plan),
        as_json,
        tmp_path / "plan.json",
        str(tmp_path / "training.onnx"),
        proto,
    ]
    assert [plan_of(form) for form in forms] == [plan] * len(forms)


def test_names_of_checkpoints_are_a_plan():
    assert plan_of(["a", "b"]) == CheckpointPlan(("a", "b"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("plan", "neither a plan file nor a training file"),
        ("[]", "is not a valid plan"),
        ('{"schema": 99}', "has schema 99, but this onnxgc reads 1"),
        ('{"schema": 1, "checkpoints": ["a"]}', "invalid 'keeps_last_segment'"),
        ('{"schema": 1, "checkpoints": [1], "keeps_last_segment": true}', "invalid list of names"),
    ],
)
def test_an_invalid_plan_file_raises_one_line(content: str, reason: str, tmp_path: Path):
    (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    with pytest.raises(PlanError, match=reason) as caught:
        plan_of(tmp_path / "plan.json")
    assert "plan.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_and_unwritable_files_raise(tmp_path: Path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(PlanError, match="cannot read the plan"):
            plan_of(path)
    with pytest.raises(PlanError, match="its metadata is corrupt"):
        plan_of(training_file("{"))
    with pytest.raises(PlanError, match="a int is not a plan"):
        plan_of(3)
    with pytest.raises(OutputFileError):
        write_plan(PLANS[0], tmp_path / "none" / "plan.json", solver="peak")
    with pytest.raises(PlanError, match="the plan has schema 7"):
        plan_from_json({"schema": 7}, "the plan")


def test_earlier_names_of_updates_are_read():
    plan = {"schema": 1, "keeps_last_segment": True, "sequence": ["w/update/w/update/Mul", "w/update/w_new"]}
    assert plan_of(plan).sequence == ("w/update/Mul", "w/update/new")
