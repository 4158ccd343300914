import numpy as np
import pytest

from onnxgc.api.comparison import compare
from onnxgc.errors import PlanError
from onnxgc.torch.partitioner_plan import tensors_saved
from tests.api.chains import chain
from tests.model.model_helpers import text_model, with_weights


@pytest.mark.parametrize("share, kept", [(1.0, 5), (0.7, 3), (0.5, 2), (0.3, 1), (0.0, 0)])
def test_a_share_of_equal_tensors_is_saved(share: float, kept: int) -> None:
    found = tensors_saved(chain(5), share, input_shapes={})
    assert len(found) == kept
    assert found <= {f"h{number}" for number in range(5)}


def test_batch_statistics_are_not_tensors_of_the_model() -> None:
    body = "{ c = Conv(x, w) n = BatchNormalization(c, s, b, m, v) r = Relu(n) z = Conv(r, w) }"
    model = text_model(f"(float[64,4,8,8] x) => (float[64,4,8,8] z) {body}")
    model = with_weights(model, w=np.ones((4, 4, 1, 1)), **dict.fromkeys("sbmv", np.ones(4)))
    # The statistics, computed from the convolution's output, are saved at any share.
    assert tensors_saved(model, 1.0, input_shapes={}) == {"c", "r"}
    assert tensors_saved(model, 0.0, input_shapes={}) == set()


def test_its_row_equals_a_plan_that_keeps_these_tensors() -> None:
    found = compare(chain(5), solvers=["torch-budget"])
    row = next(row for row in found.report["rows"] if row["name"] == "torch-budget")
    kept = tensors_saved(chain(5), 0.5, input_shapes={})
    again = compare(chain(5), solvers=["store-all"], plans={"by names": sorted(kept)})
    same = next(row for row in again.report["rows"] if row["name"] == "by names")
    assert set(kept) <= set(row["checkpoints"])
    for key in ("simulated_peak_bytes", "checkpoint_bytes", "extra_flops_ratio"):
        assert row[key] == same[key]


def test_an_error_of_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PlanError("it cannot be traced")

    monkeypatch.setattr("onnxgc.torch.partitioner_plan.tensors_saved", refuse)
    report = compare(chain(3), solvers=["torch-budget"]).report
    assert report["left_out"] == [{"name": "torch-budget", "reason": "it cannot be traced"}]
