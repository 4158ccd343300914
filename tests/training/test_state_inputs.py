"""State as inputs: the same losses to the bit, a contract that suffices, and the way back into the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxgc
from onnxgc.emission.contract import CONTRACT_KEY, UPDATES_KEY, contract_of
from onnxgc.emission.state_file import read_arrays, write_arrays
from onnxgc.errors import ModelFileError, OnnxgcError, PlanError, TrainingError
from onnxgc.tracing.optimizers import SGD, AdamW, Optimizer
from onnxgc.training import Trainer, export_state
from tests.cli.command import run_command
from tests.training.networks import digits, digits_network

BATCH = 16
SHAPES = {"image": (BATCH, 1, 8, 8)}
SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "training-contract.schema.json"
OPTIMIZERS: dict[str, Optimizer | None] = {
    "gradients": None,
    "momentum": SGD(momentum=0.9, nesterov=True),
    "adamw": AdamW(clip_norm=1.0),
}


def write(folder: Path, name: str, optimizer: Optimizer | None, state: str) -> Path:
    onnx.save(digits_network(), folder / "digits.onnx")
    file = folder / f"{name}.onnx"
    how: dict[str, Any] = {"input_shapes": SHAPES, "optimizer": optimizer, "state": state, "solver": "peak"}
    how |= {"evaluation": folder / f"{name}-evaluation.onnx", "check": False, "keep_outputs": True}
    onnxgc.optimize(folder / "digits.onnx", file, **how)
    return file


def session_of(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def batches(count: int) -> list[dict[str, Any]]:
    train, _ = digits()
    return [{name: train[name][i * BATCH : (i + 1) * BATCH] for name in train} for i in range(count)]


def loop(file: Path, contract: dict[str, Any], state: dict[str, Any], steps: range) -> tuple[list[Any], dict[str, Any]]:
    """Results of a loop that knows the contract alone: losses and gradients, and the state at the end."""
    session, found = session_of(file), []
    fetched = [contract["loss"], *contract["gradients"].values(), *contract["pairs"].values()]
    for update, batch in enumerate(batches(steps.stop)):
        if update not in steps:
            continue
        numbers = {"learning_rate": np.float32(0.01), "step": np.int64(update + 1), "draw": np.int64(update)}
        fed = {contract[role]: np.asarray(value) for role, value in numbers.items() if role in contract}
        results = dict(zip(fetched, session.run(fetched, {**batch, **state, **fed}), strict=True))
        found.append([results[name] for name in fetched[: 1 + len(contract["gradients"])]])
        state = {**state, **{old: results[new] for old, new in contract["pairs"].items()}}
    return found, state


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_contract_suffices_for_the_same_losses(tmp_path: Path, kind: str):
    stored, fed = (write(tmp_path, state, OPTIMIZERS[kind], state) for state in ("initializers", "inputs"))
    first, metadata = read_arrays(tmp_path / "inputs.safetensors")
    contract = json.loads(metadata[CONTRACT_KEY])
    graph = onnx.load(fed).graph
    required = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    assert required == {name for name, about in contract["inputs"].items() if about["required"]}
    assert contract["batch"] == ["image", "labels"]
    assert contract["pairs"].keys() <= first.keys() >= contract["gradients"].keys()
    assert {about["role"] for about in contract["outputs"].values()} >= {"loss", "statistic", "output"}
    own = contract_of(onnx.load(stored))
    assert all(own[name] == contract[name] for name in ("pairs", "gradients", "outputs", "batch"))
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(stored).graph.initializer}
    kept = {name: values.get(name, first[name]) for name in first}
    assert all(np.array_equal(kept[name], first[name]) for name in first)
    one, two = loop(stored, contract, kept, range(4))[0], loop(fed, contract, first, range(4))[0]
    assert all(
        np.array_equal(a, b) for left, right in zip(one, two, strict=True) for a, b in zip(left, right, strict=True)
    )
    assert len({float(results[0]) for results in one}) == 4


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_contracts_fit_their_json_schema(tmp_path: Path, kind: str):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, of the extra `test`, is not installed")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    write(tmp_path, "net", OPTIMIZERS[kind], "inputs")
    contract = json.loads(read_arrays(tmp_path / "net.safetensors")[1][CONTRACT_KEY])
    jsonschema.validate(contract, schema)
    for wrong in ({"schema": 2}, {"batch": "image"}, {"more": 1}, {"inputs": {"x": {"role": "x"}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**contract, **wrong}, schema)


def test_a_trainer_goes_on_where_another_program_stopped(tmp_path: Path):
    file = write(tmp_path, "net", OPTIMIZERS["adamw"], "inputs")
    first, metadata = read_arrays(tmp_path / "net.safetensors")
    contract = json.loads(metadata[CONTRACT_KEY])
    alone, end = loop(file, contract, first, range(6))
    _, half = loop(file, contract, first, range(3))
    write_arrays(half, {**metadata, UPDATES_KEY: "3"}, tmp_path / "half.safetensors")
    for start, begun in ((0, None), (3, tmp_path / "half.safetensors")):
        trainer = Trainer(file, model=tmp_path / "digits.onnx", learning_rate=0.01, threads=1)
        if begun is not None:
            trainer.load(begun)
        losses = [trainer.step(batch) for batch in batches(6)[start:]]
        assert losses == [float(results[0]) for results in alone[start:]]
        assert all(np.array_equal(trainer.array(name), end[name]) for name in first)
    # The state of the run has the contract, so that other programs go on with it in turn.
    trainer.save(tmp_path / "run.safetensors")
    arrays, about = read_arrays(tmp_path / "run.safetensors")
    assert about[UPDATES_KEY] == "6"
    assert json.loads(about[CONTRACT_KEY])["pairs"] == contract["pairs"]
    assert all(np.array_equal(arrays[name], end[name]) for name in first)


def test_trained_weights_are_evaluated_and_exported(tmp_path: Path):
    file = write(tmp_path, "net", OPTIMIZERS["adamw"], "inputs")
    first, metadata = read_arrays(tmp_path / "net.safetensors")
    contract = json.loads(metadata[CONTRACT_KEY])
    _, end = loop(file, contract, first, range(6))
    write_arrays(end, metadata, tmp_path / "end.safetensors")
    evaluation, session = contract["evaluation"], session_of(tmp_path / "net-evaluation.onnx")
    assert [value.name for value in session.get_inputs()] == evaluation["inputs"]
    weights = {name: end[name] for name in evaluation["inputs"] if name in end}
    batch = batches(7)[6]
    loss, scores = session.run([evaluation["loss"], *evaluation["outputs"]], {**weights, **batch})
    run_command("export", *(tmp_path / name for name in ("digits.onnx", "end.safetensors", "out.onnx")))
    exported = session_of(tmp_path / "out.onnx").run(None, {"image": batch["image"]})[0]
    np.testing.assert_allclose(scores, exported, rtol=1e-5, atol=1e-5)
    trainer = Trainer(file, model=tmp_path / "digits.onnx", threads=1)
    trainer.load(tmp_path / "end.safetensors")
    assert trainer.evaluate(batch)["loss"] == pytest.approx(float(loss), rel=1e-6)
    # The evaluation file of the other form runs with a batch alone.
    write(tmp_path, "stored", OPTIMIZERS["adamw"], "initializers")
    both = (
        session_of(tmp_path / "stored-evaluation.onnx").run(None, feeds)[0] for feeds in (batch, {**weights, **batch})
    )
    untrained, trained = map(float, both)
    assert trained == float(loss) != untrained


def test_other_commands_take_the_file(tmp_path: Path):
    for kind in ("gradients", "adamw"):
        file = write(tmp_path, kind, OPTIMIZERS[kind], "inputs")
        checked = onnxgc.verify(tmp_path / "digits.onnx", file, threads=1)
        assert checked.holds, checked
        assert list(onnxgc.inspect(file).inputs)[:2] == ["image", "labels"]
        assert not onnxgc.inspect(file).inputs.keys() & read_arrays(file.with_suffix(".safetensors"))[0].keys()
    train, _ = digits()
    np.savez(tmp_path / "digits.npz", **{name: array[: 2 * BATCH] for name, array in train.items()})
    how = ("--data", str(tmp_path / "digits.npz"), "--state", str(tmp_path / "run.safetensors"), "-q")
    assert run_command("train", file, *how).err == ""
    bench = ("bench", str(tmp_path / "digits.onnx"), "--plan", str(file), "--input-shapes", f"image:{BATCH},1,8,8")
    assert run_command(*bench, "--optimizer", "adamw", "--runs", "1", "--threads", "1").err == ""


def test_what_does_not_belong_together_is_one_line(tmp_path: Path):
    file = write(tmp_path, "net", OPTIMIZERS["adamw"], "inputs")
    state = tmp_path / "net.safetensors"
    arrays, metadata = read_arrays(state)
    onnx.save(digits_network(width=8), tmp_path / "other.onnx")
    poisoned = {**arrays, "head.bias": np.full_like(arrays["head.bias"], np.nan)}
    write_arrays(poisoned, metadata, tmp_path / "nan.safetensors")
    write_arrays({"head.bias": arrays["head.bias"]}, metadata, tmp_path / "part.safetensors")
    write_arrays(arrays, {}, tmp_path / "bare.safetensors")
    model = tmp_path / "digits.onnx"
    for given, name, words in (
        (tmp_path / "other.onnx", "net", "'conv1.weight' in another shape"),
        (model, "nan", "'head.bias' is not finite"),
        (model, "part", "lacks 'conv1.weight'"),
        (model, "bare", "not a state with a contract"),
        (model, "absent", "No such file"),
    ):
        with pytest.raises(OnnxgcError, match=words) as caught:
            export_state(given, tmp_path / f"{name}.safetensors")
        assert "\n" not in str(caught.value)
    with pytest.raises(OnnxgcError, match="belongs to the source model"):
        export_state(model, state, model)
    with pytest.raises(ModelFileError, match="which are in its state file"):
        Trainer(onnx.load(file))
    for contents, words in (
        (poisoned | {"fc": arrays["head.bias"]}, ""),
        ({"a": arrays["head.bias"]}, "does not belong"),
    ):
        write_arrays(contents, metadata, state)
        if words:
            with pytest.raises(ModelFileError, match=words):
                Trainer(file)
        else:
            Trainer(file)
    state.unlink()
    with pytest.raises(ModelFileError, match="has no first values"):
        Trainer(file)
    with pytest.raises(PlanError, match="unknown state 'weights'"):
        onnxgc.optimize(model, state="weights")
    for evaluation in (file, model):
        with pytest.raises(OnnxgcError, match=r"give the (evaluation file|output) another name"):
            onnxgc.optimize(model, file, evaluation=evaluation, input_shapes=SHAPES)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"onnxgc.contract": "[]"}, "has the schema None"),
        ({"onnxgc.contract": '{"schema": 2}'}, "has the schema 2, and this version reads 1"),
        ({"onnxgc.contract": '{"schema": 1, "inputs": []}'}, "is not a state with a contract"),
        ({"onnxgc.contract": '{"schema": 1, "inputs": {}}'}, "names no parameter"),
    ],
)
def test_a_wrong_contract_is_refused(change: dict[str, str], message: str, tmp_path: Path):
    file = write(tmp_path, "net", OPTIMIZERS["adamw"], "inputs")
    state = file.with_suffix(".safetensors")
    arrays, metadata = read_arrays(state)
    write_arrays(arrays, {**metadata, **change}, state)
    with pytest.raises(TrainingError, match=message):
        export_state(tmp_path / "digits.onnx", state)


@pytest.mark.parametrize("updates", ["-1", "9" * 30, "many"])
def test_a_wrong_number_of_updates_is_refused(updates: str, tmp_path: Path):
    file = write(tmp_path, "net", OPTIMIZERS["adamw"], "inputs")
    arrays, metadata = read_arrays(file.with_suffix(".safetensors"))
    write_arrays(arrays, {**metadata, "onnxgc.updates": updates}, tmp_path / "wrong.safetensors")
    with pytest.raises(TrainingError, match="is not the state of a run"):
        Trainer(file, model=tmp_path / "digits.onnx", threads=1).load(tmp_path / "wrong.safetensors")
    whole = {name: array.astype(np.int64) for name, array in arrays.items()}
    write_arrays(whole, metadata, tmp_path / "whole.safetensors")
    with pytest.raises(TrainingError, match="in another shape or type"):
        export_state(tmp_path / "digits.onnx", tmp_path / "whole.safetensors")
