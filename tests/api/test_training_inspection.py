from pathlib import Path

import onnx
import pytest

from onnxgc.api import inspect, optimize
from onnxgc.api.card import step_costs
from onnxgc.emission.static_types import static_types
from onnxgc.errors import ModelFileError
from onnxgc.tracing.devices import device

MODEL = Path(__file__).parents[2] / "models" / "resnet18.onnx"


@pytest.mark.parametrize("provider, barriers", [("cpu", "auto"), ("cuda", "none")])
def test_costs_of_a_file_are_those_of_its_step(provider: str, barriers: str) -> None:
    result = optimize(
        MODEL,
        input_shapes={"x": (2, 3, 64, 64)},
        optimizer="adamw",
        provider=provider,
        barriers=barriers,
        solver="peak",
        check=False,
    )
    planned, model = result.planned, result.training_graph.model
    found = inspect(model, provider="cuda", device="h200")
    has_barriers = barriers == "auto"
    expected = step_costs(planned.step, planned.schedule, device("h200"), has_barriers=has_barriers)
    assert found.card == expected
    assert found.card[-1].nodes == len(model.graph.node)
    assert found.left_to_the_cpu == {}
    assert found.planned_peak_bytes == result.report["planned"]["simulated_peak_bytes"]
    assert set(found.inputs) == {"x", "labels", "learning_rate", "step"}
    assert {weight.name for weight in found.weights if weight.role == "parameter"} == set(planned.model.parameters)
    assert found.inputs["x"] == (2, 3, 64, 64)
    assert found.notes[0].endswith(f"for {provider}, {'with' if has_barriers else 'without'} barriers")
    types = static_types(model)
    assert {name: types[name] for name in planned.step.graph.outputs} == {
        name: planned.step.types[name] for name in planned.step.graph.outputs
    }


def test_options_of_reading_do_not_apply_to_a_training_file() -> None:
    model = optimize(MODEL, input_shapes={"x": (1, 3, 64, 64)}, solver="peak", check=False).training_graph.model
    with pytest.raises(ModelFileError, match="inspected as it is"):
        inspect(model, freeze=["conv1.weight"])
    broken = onnx.ModelProto()
    broken.CopyFrom(model)
    del broken.metadata_props[:]
    broken.metadata_props.add(key="onnxgc.schema", value="1")
    with pytest.raises(ModelFileError, match=r"metadata .* are incomplete or wrong"):
        inspect(broken)
