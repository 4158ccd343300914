import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgc.api import optimize
from onnxgc.cli import main as main_module
from onnxgc.cli.arguments import parse_shapes
from onnxgc.errors import ShapeError
from tests.cli.command import run_command
from tests.model.model_helpers import normal, text_model, with_weights

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "models"
RESNET18 = MODELS / "resnet18.onnx"
SMALL = ("--input-shapes", "x:2,3,64,64")


onnxgc = functools.partial(run_command, width=160)


def save(path: Path, text: str, **weights: tuple[int, ...]) -> Path:
    model = text_model(text, opset=17)
    onnx.save(with_weights(model, **{name: normal(*shape) for name, shape in weights.items()}), path)
    return path


def test_optimize_writes_a_file_and_shows_its_figures(tmp_path: Path):
    onnxgc("optimize", RESNET18, *SMALL, "--dry-run", cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    done = onnxgc("optimize", RESNET18, *SMALL, "--json", "-", cwd=tmp_path)
    report = json.loads(done.out)
    assert set(report) >= {
        "model", "output", "objective", "solver", "status", "vertices", "operators", "regular",
        "planned", "lower_bound_bytes", "gap", "checkpoints", "seconds",
    }  # fmt: skip
    assert set(report["regular"]) >= {"activation_bytes", "simulated_peak_bytes"}
    assert set(report["planned"]) >= {
        "checkpoint_bytes", "heaviest_segment_bytes", "paper_objective_bytes", "simulated_peak_bytes",
        "extra_flops_ratio",
    }  # fmt: skip
    assert set(report["seconds"]) == {"read", "solve", "emit", "total"}
    assert (report["objective"], report["solver"]) == ("time", "budget")
    planned = report["planned"]
    assert planned["simulated_peak_bytes"] >= report["lower_bound_bytes"] > 0
    assert planned["checkpoint_bytes"] + planned["heaviest_segment_bytes"] == planned["paper_objective_bytes"]
    assert "baseline" in done.err
    assert report["output"] == "resnet18-training.onnx"
    onnx.checker.check_model(str(tmp_path / "resnet18-training.onnx"), full_check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["resnet18-training.onnx"]
    names = "layer1.1.relu2,layer3.0.relu2"
    done = onnxgc("optimize", RESNET18, *SMALL, "--checkpoints", names, "--dry-run", "--json", "-")
    report = json.loads(done.out)
    assert (report["solver"], report["status"]) == ("manual", "feasible")
    assert set(names.split(",")) <= set(report["checkpoints"])


def test_the_paper_objective(tmp_path: Path):
    done = onnxgc("optimize", RESNET18, *SMALL, "--dry-run", "--objective", "paper", "--json", "-", cwd=tmp_path)
    report = json.loads(done.out)
    assert (report["objective"], report["solver"], report["status"]) == ("paper", "acg", "optimal")
    assert report["planned"]["paper_objective_bytes"] == report["lower_bound_bytes"]
    assert "optimal for the objective 'paper'" in done.err
    done = onnxgc("optimize", RESNET18, *SMALL, "--objective", "peak", "--solver", "acg", cwd=tmp_path, code=2)
    assert "solver 'acg' has the objective 'paper', not 'peak'" in done.err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "out.onnx"
    onnxgc("optimize", RESNET18, path, *SMALL, "--save-external-data", "--solver", "peak", "--no-check")
    assert path.stat().st_size < 2_000_000
    assert path.with_name("out.onnx.data").stat().st_size > 40_000_000
    return path


def test_verify_accepts_the_file_and_rejects_others(training: Path):
    done = onnxgc("verify", RESNET18, training, "--json", "-", "--threads", "1")
    assert json.loads(done.out)["holds"] is True
    for model, file, words in ((RESNET18, RESNET18, "not written by onnxgc"), (MODELS / "resnet50.onnx", training, "")):
        done = onnxgc("verify", model, file, code=2)
        assert words in done.err


def test_verify_detects_a_wrong_gradient(training: Path, tmp_path: Path):
    model = onnx.load(training)
    node = next(n for n in model.graph.node if n.output[0] == "fc.weight_grad")
    node.output[0] = "fc.weight_grad_right"
    index = list(model.graph.node).index(node)
    wrong = onnx.helper.make_node("Mul", ["fc.weight_grad_right", "wrong"], ["fc.weight_grad"], name="wrong")
    model.graph.node.insert(index + 1, wrong)
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(1.01, np.float32), "wrong"))
    onnx.save(model, tmp_path / "out.onnx")
    done = onnxgc("verify", RESNET18, tmp_path / "out.onnx", code=1)
    assert "fc.weight_grad" in done.out
    assert "FAILED" in done.out


def test_inspect_shows_parameters_rules_and_peaks():
    done = onnxgc("inspect", RESNET18, *SMALL, "--provider", "cuda", "--json", "-")
    found = json.loads(done.out)
    roles = [weight["role"] for weight in found["weights"]]
    assert roles.count("parameter") == 62
    assert roles.count("statistic") == 40
    assert not found["obstacles"]
    assert found["planned"]["simulated_peak_bytes"] < found["regular"]["simulated_peak_bytes"]
    assert {use["gradient"] for use in found["operators"]} == {"rule", "none needed"}
    *operators, total = found["card"]
    assert total["operator"] == "total"
    assert total["kernels"] == sum(cost["kernels"] for cost in operators) < total["nodes"]


def test_inspect_shows_obstacles(tmp_path: Path):
    model = save(tmp_path / "m.onnx", "(float[4,4] x) => (float y) {a = MatMul(x, w) y = Det(a)}", w=(4, 4))
    done = onnxgc("inspect", model)
    assert "Det" in done.out
    assert "missing" in done.out
    assert "obstacle" in done.out


MATMUL = "(float[2,4] x) => (float[2,4] y) {a = MatMul(x, w) y = Relu(a)}"


@pytest.mark.parametrize(
    "name, content, arguments, words",
    [
        ("empty.onnx", b"", (), ("empty.onnx",)),
        ("good.onnx", RESNET18.read_bytes(), ("--input-shapes", "y:1,3,64,64"), ("'y'", "'x'")),
        ("good.onnx", RESNET18.read_bytes(), ("--input-shapes", "x=1,3,64,64"), ("x:64,3,224,224",)),
        ("good.onnx", RESNET18.read_bytes(), ("--input-shapes", "x:1,4,64,64"), ("conv1",)),
        ("good.onnx", RESNET18.read_bytes(), ("--loss", "nonsense"), ("nonsense",)),
        ("good.onnx", RESNET18.read_bytes(), ("--freeze", "fc.wieght"), ("fc.wieght", "fc.weight")),
        ("good.onnx", RESNET18.read_bytes(), ("--checkpoints", "layer1.0.relu3"), ("layer1.0.relu",)),
        ("good.onnx", RESNET18.read_bytes(), ("--solver", "exhaustive"), ("exhaustive", "vertices")),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_writes_nothing(
    tmp_path: Path, name: str, content: bytes | None, arguments: tuple[str, ...], words: tuple[str, ...]
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "out.onnx").write_text("precious")
    before = sorted(tmp_path.iterdir())
    done = onnxgc("optimize", name, "out.onnx", *arguments, "--json", "out.json", cwd=tmp_path, code=2)
    assert not done.out
    for word in words:
        assert word in done.err
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "out.onnx").read_text() == "precious"


def test_all_operators_without_a_rule_are_named_at_once(tmp_path: Path):
    text = """(float[1,1,4,4] x) => (float[1,1] y) {
        a = MatMul(x, w) b = MaxRoiPool<pooled_shape=[4,4]>(a, r) c = Relu(b) y = Det(c)
    }"""
    save(tmp_path / "m.onnx", text, w=(4, 4), r=(1, 5))
    done = onnxgc("optimize", "m.onnx", "out.onnx", cwd=tmp_path, code=2)
    assert "MaxRoiPool" in done.err
    assert "Det at" in done.err
    assert not (tmp_path / "out.onnx").exists()


def test_shapes_that_cannot_be_inferred(tmp_path: Path):
    text = "(float[2,4] x) => (y) {a = MatMul(x, w) n = NonZero(a) f = Cast<to = 1>(n) y = MatMul(f, f)}"
    path = save(tmp_path / "m.onnx", text.replace("(y)", "(float[N,N] y)"), w=(4, 4))
    done = onnxgc("optimize", path, "out.onnx", cwd=tmp_path, code=2)
    assert "'n'" in done.err


@pytest.mark.parametrize("output", ["nowhere/out.onnx", "folder"])
def test_an_output_that_cannot_be_written(tmp_path: Path, output: str):
    (tmp_path / "folder").mkdir()
    onnxgc("optimize", RESNET18, output, *SMALL, cwd=tmp_path, code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_the_module_runs_as_a_program():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "onnxgc", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("onnxgc ")


def test_shapes_in_both_forms():
    assert parse_shapes(["x:64,3,224,224 y:2x8"]) == {"x": (64, 3, 224, 224), "y": (2, 8)}
    assert parse_shapes(["in:put:1,2", "s:"]) == {"in:put": (1, 2), "s": ()}
    for text in ("x", "x:a,b", ":1", "x:1,,2", "x:-1,2"):
        with pytest.raises(ShapeError):
            parse_shapes([text])


MLP = """(float[4,6] x) => (float[4,4] y) {
    a = Gemm(x, w, b)  c = Relu(a)  d = Dropout(c)  e = Gemm(d, w2, b2)  f = Tanh(e)  y = MatMul(f, w3)
}"""
MLP_WEIGHTS = {"w": (6, 32), "b": (32,), "w2": (32, 32), "b2": (32,), "w3": (32, 4)}


def test_a_small_model_with_external_data(tmp_path: Path):
    text = "(float[2,4] x) => (float[2,4] y) {a = MatMul(x, w) y = Relu(a)}"
    save(tmp_path / "m.onnx", text, w=(4, 4))
    done = onnxgc("optimize", "m.onnx", "o.onnx", "--save-external-data", "--verify", "1", cwd=tmp_path)
    assert "bit-identical" in done.out
    assert not (tmp_path / "o.onnx.data").exists()


def test_the_models_own_files_are_never_written(tmp_path: Path):
    path = save(tmp_path / "m.onnx", MLP, **MLP_WEIGHTS)
    model = onnx.load(path)
    onnx.save(model, tmp_path / "e.onnx", save_as_external_data=True, location="out.onnx.data", size_threshold=0)
    before = {name.name: name.read_bytes() for name in tmp_path.iterdir()}
    (tmp_path / "link.onnx").symlink_to("m.onnx")
    for arguments in (
        ("m.onnx", "m.onnx"),
        ("m.onnx", "link.onnx"),
        ("e.onnx", "out.onnx", "--save-external-data"),
        ("e.onnx", "out.onnx.data"),
        ("m.onnx", "o.onnx", "--json", "o.onnx"),
        ("m.onnx", "--dry-run", "--json", "m.onnx"),
        ("e.onnx", "p.onnx", "--json", "out.onnx.data"),
        ("m.onnx", "p.onnx", "--save-external-data", "--json", "p.onnx.data"),
    ):
        onnxgc("optimize", *arguments, cwd=tmp_path, code=2)
    (tmp_path / "link.onnx").unlink()
    assert {name.name: name.read_bytes() for name in tmp_path.iterdir()} == before


def test_devices_and_links_are_not_replaced(tmp_path: Path):
    save(tmp_path / "m.onnx", MLP, **MLP_WEIGHTS)
    os.mkfifo(tmp_path / "pipe")
    onnxgc("optimize", "m.onnx", "pipe", cwd=tmp_path, code=2)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    onnxgc("optimize", "m.onnx", "one", cwd=tmp_path, code=2)
    (tmp_path / "real.onnx").write_text("old")
    (tmp_path / "link.onnx").symlink_to("real.onnx")
    onnxgc("optimize", "m.onnx", "link.onnx", cwd=tmp_path)
    assert (tmp_path / "link.onnx").is_symlink()
    assert (tmp_path / "real.onnx").read_bytes() != b"old"


def test_names_are_not_markup(tmp_path: Path):
    model = onnx.load(save(tmp_path / "m.onnx", MLP, **MLP_WEIGHTS))
    text = model.SerializeToString().replace(b"w3", b"[/")
    folder = tmp_path / "[red]"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(text)
    for command in ("inspect", "optimize"):
        done = onnxgc(command, "[red]/m.onnx", cwd=tmp_path)
    assert "[red]" in done.out
    assert "[/" in onnxgc("inspect", "[red]/m.onnx", cwd=tmp_path).out


@pytest.mark.slow
def test_recomputed_activations_load_in_every_session(tmp_path: Path):
    """The runtime fuses a Gemm with its activation and copies the activation's attributes."""
    save(tmp_path / "m.onnx", MLP, **MLP_WEIGHTS)
    for checkpoints in ("c", "a", "d", "e", "f"):
        plan = ("--checkpoints", checkpoints, "--verify", "1", "--json", "-")
        done = onnxgc("optimize", "m.onnx", "o.onnx", *plan, cwd=tmp_path)
        checks = json.loads(done.out)["verification"]["checks"]
        assert "default session" in [check["name"] for check in checks]


def test_verify_reads_shapes_from_the_training_file(tmp_path: Path):
    text = """(float[N,3,H,W] x) => (float[N,a] y) {
        b = Conv <strides = [2, 2]> (x, w)  c = Conv <strides = [2, 2]> (b, w)  y = Flatten(c)
    }"""
    save(tmp_path / "m.onnx", text, w=(3, 3, 3, 3))
    onnxgc("optimize", "m.onnx", "o.onnx", "--input-shapes", "x:2,3,32,32", cwd=tmp_path)
    onnxgc("verify", "m.onnx", "o.onnx", cwd=tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("optimize", "m.onnx", "o.onnx", "--bogus"),
        ("optimize", "m.onnx", "o.onnx", "--input-shapes", "x:²,6"),
        ("optimize", "m.onnx", "o.onnx", "--input-shapes", "x:99999999999999999999,6"),
        ("optimize", "m.onnx", "o" * 300),
        ("optimize",),
        ("nonsense",),
        ("verify", "m.onnx", "damaged.onnx"),
    ],
)
def test_a_usage_error_is_one_line(tmp_path: Path, arguments: tuple[str, ...]):
    save(tmp_path / "m.onnx", MLP, **MLP_WEIGHTS)
    damaged = onnx.load(tmp_path / "m.onnx")
    for key, value in (("plan", "[]"), ("options", '{"x": 1}'), ("simulated_peak_bytes", "1")):
        damaged.metadata_props.add(key=f"onnxgc.{key}", value=value)
    onnx.save(damaged, tmp_path / "damaged.onnx")
    done = onnxgc(*arguments, cwd=tmp_path, code=2)
    assert ".;" not in done.err
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.slow
def test_external_data_replaces_earlier_files(tmp_path: Path):
    """A file of the same name is replaced; one in another folder stays."""
    save(tmp_path / "m.onnx", MLP, **MLP_WEIGHTS)
    (tmp_path / "sub").mkdir()
    (tmp_path / "o.onnx.data").write_bytes(b"something else")
    for target in ("sub/o.onnx", "sub/o.onnx"):
        onnxgc("optimize", "m.onnx", target, "--save-external-data", "--verify", "1", cwd=tmp_path)
    assert (tmp_path / "o.onnx.data").read_bytes() == b"something else"
    (tmp_path / "sub" / "o.onnx.data").unlink()
    onnxgc("verify", "m.onnx", "sub/o.onnx", cwd=tmp_path, code=2)


def test_a_returned_graph_contains_its_weights_despite_external_data(tmp_path: Path):
    path = save(tmp_path / "m.onnx", MLP, **MLP_WEIGHTS)
    result = optimize(path, tmp_path / "o.onnx", external_data=True)
    outside = [t for t in result.training_graph.model.graph.initializer if t.external_data]
    assert not outside
    written = onnx.load(tmp_path / "o.onnx")
    for one, two in zip(result.training_graph.model.graph.initializer, written.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(one), numpy_helper.to_array(two))


def test_no_arguments_show_the_help():
    done = onnxgc(code=2)
    assert len((done.out + done.err).splitlines()) > 5
    assert "optimize" in done.out + done.err


def test_help_shows_complete_summaries_and_groups_of_options():
    summaries = onnxgc("-h", width=80).out.partition("Commands:")[2].splitlines()
    assert len(summaries) == 9
    assert all(line.endswith(".") and "..." not in line for line in summaries[1:])
    text = onnxgc("optimize", "-h").out
    assert text == onnxgc("optimize", "--help").out
    groups = re.findall(r"^([A-Z][^:\n]*):$", text, re.MULTILINE)
    assert groups == ["Arguments", "Plan", "Durations (with a budget)", "Search", "Model", "Files", "Report", "Options"]
    assert "Example: onnxgc optimize " in text


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(main_module, "app", lambda **_: 130)
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "onnxgc: interrupted\n"
