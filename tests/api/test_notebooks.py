"""What a notebook shows of results: curves as arrays, one line, a picture or a table."""

import onnxgc
from tests.api.chains import chain


def test_curves_of_a_plan_reach_the_reported_peaks():
    result = onnxgc.optimize(chain(), optimizer="adamw", check=False, solver="peak")
    report = result.report
    assert result.memory_curve().max() == report["planned"]["simulated_peak_bytes"]
    assert result.memory_curve(baseline=True).max() == report["regular"]["simulated_peak_bytes"]
    assert len(result.memory_curve()) == len(result.planned.schedule.runs)
    assert "baseline" in repr(result)
    assert len(repr(result)) < 120
    assert result._repr_html_().count("<path") == 2


def test_a_comparison_is_a_table():
    found = onnxgc.compare(chain(), solvers=["acg"])
    assert found._repr_markdown_().count("\n|") == 4
    assert repr(found) == "<Comparison: g, 2048x16: plans for one training step>"
