from typing import Any

import pytest

from onnxgc.api.pipeline import optimize
from onnxgc.planning.simulate import live_at_peak
from tests.api.chains import chain


@pytest.mark.parametrize("how", [{"solver": "store-all"}, {"solver": "acg"}, {"budget": 0.7, "step_limit": 1}])
def test_live_tensors_sum_to_the_peak(how: dict[str, Any]):
    planned = optimize(chain(6), check=False, **how).planned
    live = live_at_peak(planned.schedule, planned.step.graph, planned.profile)
    assert sum(size for _, size in live) == planned.profile.peak_bytes
    assert [size for _, size in live] == sorted((size for _, size in live), reverse=True)
    peak_operator = planned.profile.peak_operator
    runs = {step.operator.name: step.operator for step in planned.schedule.instructions if hasattr(step, "operator")}
    assert set(runs[peak_operator].outputs) & {name for name, _ in live}
