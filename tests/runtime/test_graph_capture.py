from typing import Any

import numpy as np
import onnx
import pytest

from onnxgc.api.pipeline import optimize
from onnxgc.errors import RuntimeUnavailableError
from onnxgc.model.core.ir import TensorType
from onnxgc.runtime import io_binding
from onnxgc.runtime.graph_capture import capture_obstacle
from onnxgc.runtime.io_binding import BoundSession, DeviceArrays
from onnxgc.runtime.ort import make_session
from tests.api.chains import chain
from tests.model.model_helpers import text_model

CPU = ("CPUExecutionProvider",)
FLOAT = onnx.TensorProto.FLOAT


def graph(body: str) -> onnx.ModelProto:
    return text_model(f"(float[4] x) => (float[4] y) {{ {body} }}")


@pytest.mark.parametrize(
    "body, reason",
    [
        ("[a] a = RandomNormalLike (x) y = Add (x, a)", "node 'a' (RandomNormalLike) would draw the same"),
        ("y = Bernoulli (x)", "node 'y' (Bernoulli) would draw the same"),
        ("i = NonZero (x) s = Squeeze (i) y = Gather (x, s)", "output of node 'i' (NonZero) depends"),
        ("y = Relu (x)", None),
        ("y, m = Dropout (x)", None),
    ],
)
def test_nodes_that_a_replay_would_change_are_named(body: str, reason: str | None):
    found = capture_obstacle(graph(body))
    assert found is None if reason is None else reason in str(found)


def test_subgraphs_are_named():
    branch = onnx.helper.make_graph([], "g", [], [])
    node = onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    found = capture_obstacle(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [])))
    assert found == "node 'y' (If) runs a subgraph"


def test_training_files_need_no_barriers():
    files = {barriers: optimize(chain(1), barriers=barriers, check=False) for barriers in ("auto", "none")}
    found = {barriers: capture_obstacle(file.training_graph.model) for barriers, file in files.items()}
    assert found["none"] is None
    assert "--barriers none" in str(found["auto"])


def test_a_cuda_graph_needs_a_card():
    with pytest.raises(RuntimeUnavailableError, match="need the provider cuda"):
        make_session(graph("y = Relu (x)"), providers=CPU, cuda_graph=True)


class _Repeating:
    """A session whose first run executes the graph several times, as it does to capture a CUDA graph."""

    def __init__(self, session: Any) -> None:
        self._session, self._warm_ups = session, 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get_input_memory_infos(self) -> list[Any]:
        return []

    def get_inputs(self) -> list[Any]:
        return []

    def run_with_iobinding(self, binding: Any) -> None:
        for _ in range(1 + self._warm_ups):
            self._session.run_with_iobinding(binding)
        self._warm_ups = 0


def test_capture_leaves_the_arrays_unchanged(monkeypatch: pytest.MonkeyPatch):
    body = "{ [a] w_new = Add (w, x) [b] loss = Mul (w_new, x) }"
    model = text_model(f"(float[4] w, float[4] x) => (float[4] w_new, float[4] loss) {body}")
    requested: list[bool] = []

    def without_card(*arguments: Any, cuda_graph: bool, **how: Any) -> Any:
        requested.append(cuda_graph)
        return _Repeating(make_session(*arguments, **how))

    monkeypatch.setattr(io_binding, "make_session", without_card)
    arrays = DeviceArrays("cpu")
    arrays.put("w", np.zeros(4, np.float32))
    session = BoundSession(
        model,
        arrays,
        held=["w"],
        replaced={"w_new": "w"},
        fetched={"loss": TensorType(FLOAT, (4,))},
        providers=CPU,
        threads=1,
        cuda_graph=True,
    )
    for step in range(1, 4):
        session.run({"x": np.ones(4, np.float32)})
        np.testing.assert_array_equal(arrays.array("w"), np.full(4, step, np.float32))
        np.testing.assert_array_equal(session.result("loss"), np.full(4, step, np.float32))
    assert requested == [True]


def test_inputs_on_the_cpu_are_named():
    model = graph("y = Relu (x)")
    session = BoundSession(model, DeviceArrays("cpu"), held=(), replaced={}, fetched={}, providers=CPU, threads=1)
    with pytest.raises(RuntimeUnavailableError, match="its input 'x' is read on the CPU"):
        session._check_inputs()
