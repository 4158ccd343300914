"""Plans as JSON: what is written is read again, and what is no plan is refused in one line."""

from __future__ import annotations

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
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[1] x) => (float[1] x) {}'
    )
    proto.metadata_props.add(key=METADATA_KEY, value=text)
    return proto


@pytest.mark.parametrize("plan", PLANS)
def test_plans_are_the_same_in_every_form(plan: CheckpointPlan, tmp_path: Path) -> None:
    described = plan_as_json(plan, "peak")
    write_plan(plan, tmp_path / "plan.json", solver="peak", model="model.onnx")
    proto = training_file(json.dumps(described))
    onnx.save(proto, tmp_path / "training.onnx")
    forms: list[Any] = [
        plan,
        SimpleNamespace(plan=plan),
        described,
        tmp_path / "plan.json",
        str(tmp_path / "training.onnx"),
        proto,
    ]
    assert [plan_of(form) for form in forms] == [plan] * len(forms)


def test_names_alone_are_a_plan() -> None:
    assert plan_of(["a", "b"]) == CheckpointPlan(("a", "b"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("plan", "neither a plan file nor a training file"),
        ("{}", "lacks or garbles 'schema'"),
        ("[]", "is no plan"),
        ("null", "is no plan"),
        ('{"schema": 99}', "has schema 99, this onnxgc reads 1"),
        ('{"schema": 1, "checkpoints": ["a"]}', "keeps_last_segment"),
        ('{"schema": 1, "checkpoints": "abc", "keeps_last_segment": true}', "a list of names"),
        ('{"schema": 1, "checkpoints": [1], "keeps_last_segment": true}', "a list of names"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    with pytest.raises(PlanError, match=reason) as told:
        plan_of(tmp_path / "plan.json")
    assert "plan.json" in str(told.value)
    assert "\n" not in str(told.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(PlanError, match="cannot read the plan"):
            plan_of(path)
    with pytest.raises(PlanError, match="its metadata is garbled"):
        plan_of(training_file("{"))
    with pytest.raises(PlanError, match="not a int"):
        plan_of(3)
    with pytest.raises(OutputFileError):
        write_plan(PLANS[0], tmp_path / "none" / "plan.json", solver="peak")
    with pytest.raises(PlanError, match="the plan has schema 7"):
        plan_from_json({"schema": 7}, "the plan")
