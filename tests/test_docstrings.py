import doctest
import importlib

import pytest

MODULES: tuple[str, ...] = (
    "onnxgc.budget.bounds.integer_programs",
    "onnxgc.budget.operator_problem",
    "onnxgc.budget.search",
    "onnxgc.cli.arguments",
    "onnxgc.emission.plan_files",
    "onnxgc.graph.computation_graph",
    "onnxgc.graph.division_tree",
    "onnxgc.graph.orders",
    "onnxgc.graph.segments",
    "onnxgc.matching.normal_form.dimensions",
    "onnxgc.model.core.lossless_casts",
    "onnxgc.model.core.name_globs",
    "onnxgc.model.operators.einsum_equation",
    "onnxgc.model.rebatch.axis_change",
    "onnxgc.model.training_mode.counter_based_random",
    "onnxgc.model.weight_roles.value_patterns",
    "onnxgc.planning.deadline",
    "onnxgc.planning.memory_budget",
    "onnxgc.report.text.units",
    "onnxgc.solvers.baselines.bptt",
    "onnxgc.solvers.baselines.revolve",
    "onnxgc.solvers.reversal_schedule",
    "onnxgc.solvers.paper.segment_cap_search",
    "onnxgc.torch.checkpointing",
    "onnxgc.torch.onnx_module",
    "onnxgc.tracing.devices",
    "onnxgc.tracing.optimizers",
    "onnxgc.training.learning_rates",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str):
    if name.startswith("onnxgc.torch."):
        pytest.importorskip("torch")
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0
