from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgc.api.pipeline import OptimizeResult, optimize
from onnxgc.errors import TrainingError
from onnxgc.runtime.ort import make_session
from onnxgc.tracing.optimizers import AdamW
from onnxgc.training import Trainer, run_source, sessions
from onnxgc.training.run_source import Source
from onnxgc.training.training_file import TrainingFile
from tests.api.chains import chain
from tests.model.model_helpers import normal, text_model, with_weights
from tests.training.samples import make_trainer, samples


def normalised_twice() -> onnx.ModelProto:
    """Running statistics that one normalisation updates, and another reads in both passes."""
    model = text_model("""(float[64, 16] x) => (float[64, 4] y) {
        a = MatMul (x, w)
        n, new_mean, new_variance = BatchNormalization <training_mode = 1> (a, s, b, mean, variance)
        t = Tanh (n)
        m = BatchNormalization (t, s, b, mean, variance)
        h = Tanh (m)
        y = MatMul (h, v)
    }""")
    shapes = {"w": (16, 16), "v": (16, 4), **dict.fromkeys(("s", "b", "mean", "variance"), (16,))}
    return with_weights(model, **{name: np.abs(normal(*shape, seed=2)) + 0.1 for name, shape in shapes.items()})


def test_statistics_with_several_readers_are_copied():
    training = optimize(normalised_twice(), optimizer="sgd", check=False).training_graph.model
    session = make_session(training, threads=1)
    names = [output.name for output in session.get_outputs()]
    # Nothing is written in place here.
    given = {**samples(0), "learning_rate": np.asarray(0.1, np.float32)}
    apart = dict(zip(names, session.run(names, given), strict=True))
    trainer = Trainer(training, learning_rate=0.1, threads=1)
    assert trainer.step(samples(0)) == apart["loss"]
    for name in ("w", "s", "b", "v", "mean", "variance"):
        np.testing.assert_array_equal(trainer.array(name), apart[f"{name}_new"], err_msg=name)


def test_statistics_with_one_reader_are_updated_in_place():
    """One that is read twice, or not at all, may be replaced before its last reader or has none to follow."""
    names = ("none", "one", "two", "three")
    nodes = [
        helper.make_node("Add", [name, name] if turn else [name, "x"], [f"{name}{turn}"])
        for name, turn in (("one", 0), ("two", 1), ("three", 0), ("three", 1))
    ]
    graph = helper.make_model(helper.make_graph(nodes, "g", [], []))
    file = SimpleNamespace(graph=graph, statistics={name: f"{name}_new" for name in names})
    assert set(sessions._copied_statistics(cast(TrainingFile, file))) == {"none", "two", "three"}


def test_sessions_of_few_batch_sizes_are_kept():
    trainer = make_trainer(chain(1), optimizer="sgd", batch=8)
    for size in (8, 1, 2, 3, 1, 4, 5):
        trainer.step(samples(0, size))
        trainer.evaluate({name: array[:size] for name, array in samples(0).items()})
    trainer.evaluate(samples(0, 7))
    assert set(trainer._engine._steps) == {8, 1, 4, 5}
    assert set(trainer._engine._evaluations) == {8, 4, 5, 7}


def test_a_smaller_batch_stays_within_the_peak(monkeypatch: pytest.MonkeyPatch):
    """The optimizer's state is no part of that peak."""

    def optimized_quickly(*arguments: Any, **options: Any) -> OptimizeResult:
        if "budget" in options:
            options["step_limit"] = 1
        return optimize(*arguments, **options)

    monkeypatch.setattr(run_source, "optimize", optimized_quickly)
    source = Source.from_model(
        chain(2, batch=64),
        AdamW(),
        accumulates=False,
        batch=None,
        seed=0,
        progress=lambda _: None,
        options={"solver": "store-all", "check": False},
    )
    most = source.file_of(63).simulated_peak_bytes * 83 // 100
    limited = replace(source, file=replace(source.file, simulated_peak_bytes=most))
    assert limited.file_of(63).simulated_peak_bytes <= most


def function_without_kernel() -> onnx.ModelProto:
    """ONNX Runtime runs HardSigmoid in float64 by its definition, whose nodes come after all others."""
    model = text_model("(double[8, 16] x) => (double[8, 4] y) { a = MatMul(x, w) h = HardSigmoid(a) y = MatMul(h, v) }")
    for name, shape in {"w": (16, 16), "v": (16, 4)}.items():
        model.graph.initializer.append(numpy_helper.from_array(normal(*shape).astype(np.float64), name))
    return model


def test_steps_have_barriers_only_where_the_runtime_would_change_the_order():
    """Trained weights are the same, since a file with barriers keeps the order in any session."""
    for model, has_barriers in ((chain(2, batch=8), False), (function_without_kernel(), True)):
        trainer = make_trainer(model, optimizer="sgd")
        assert trainer._file.has_barriers is has_barriers
        assert trainer._file.with_barriers is None
        batch = {name: array[:8] for name, array in samples(0).items()}
        if has_barriers:
            batch["x"] = batch["x"].astype(np.float64)
        written = optimize(model, optimizer="sgd", check=False).training_graph.model
        other = Trainer(written, threads=1)
        assert other._file.has_barriers is True
        assert [trainer.step(batch) for _ in range(3)] == [other.step(batch) for _ in range(3)]


def test_a_file_without_barriers_must_keep_its_order():
    written = optimize(function_without_kernel(), optimizer="sgd", barriers="none", check=False)
    with pytest.raises(TrainingError, match="would not run it in order"):
        Trainer(written.training_graph.model, threads=1)
