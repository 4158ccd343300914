import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "onnxgc"

LAYERS = (
    "cli",
    "passes",
    "training",
    "api",
    "report",
    "runtime",
    "torch",
    "emission",
    "matching",
    "tracing",
    "gradients",
    "model",
    "solvers",
    "budget",
    "planning",
    "graph",
    "errors",
)
"""From top to bottom. A layer may import itself and those below it."""

FOLDERS = {
    "model": ("weight_roles", "training_mode", "opset", "static_shapes", "rebatch", "files", "operators", "core"),
    "solvers": ("baselines", "peak", "paper"),
    "budget": ("improve", "bounds"),
    "matching": ("operators", "probes", "normal_form"),
    "report": ("html", "terminal", "text", "data"),
}
"""Folders of a layer, from top to bottom; files outside of folders may import and be imported by all."""

FORBIDDEN = {
    "graph": ("onnx", "onnxgc.model"),
    "planning": ("onnx", "onnxgc.model"),
    "solvers": ("onnx", "onnxgc.model", "onnxgc.gradients"),
    "budget": ("onnx", "onnxgc.model", "onnxgc.gradients"),
    "gradients": ("onnxgc.solvers",),
}
"""Packages that a layer must not import, in addition to the order."""

HOMES = {"onnxruntime": "runtime", "torch": "torch", "highspy": "budget", "numba": "budget"}
"""Packages that are optional or heavy, and the one layer that imports each."""

OFFERED = {"runtime/__init__.py": "onnxgc.training.Trainer"}
"""Names from a higher layer that a file offers lazily, since users look for them there."""

PRINTING_LAYER = "cli"


def violations(path: Path, package: Path) -> list[str]:
    """Violations of the rules in a file of `package`, as `file:line: reason`."""
    inner = path.relative_to(package)
    is_root_file = inner.name in ("__init__.py", "__main__.py") and len(inner.parts) == 1
    layer = "" if is_root_file else inner.parts[0].removesuffix(".py")
    if layer and layer not in LAYERS:
        return [f"{inner}: '{layer}' is no layer; add it to LAYERS or move the file"]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    parent = ".".join(("onnxgc", *inner.parent.parts))
    offered = OFFERED.get(inner.as_posix())
    found = [(line, complaint(layer, module)) for module, line in imported(tree, parent) if module != offered]
    if layer in FOLDERS and len(inner.parts) > 2:
        found += [(line, inner_complaint(layer, inner.parts[1], module)) for module, line in imported(tree, parent)]
    if layer != PRINTING_LAYER:
        found += [(line, "only cli prints") for line in prints(tree)]
    return [f"{inner}:{line}: {reason}" for line, reason in sorted(found) if reason]


def imported(tree: ast.Module, parent: str) -> Iterator[tuple[str, int]]:
    """Full names of all imports, those in functions and under TYPE_CHECKING included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = resolve_name("." * level + (module or ""), parent)
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module, node.lineno


def complaint(layer: str, module: str) -> str:
    """Why a file of `layer` ("" for the package's own files) may not import `module`, or ""."""
    top, _, rest = module.partition(".")
    if top in HOMES and layer != HOMES[top]:
        return f"{top} is imported only in {HOMES[top]}"
    for name in FORBIDDEN.get(layer, ()):
        if module == name or module.startswith(name + "."):
            return f"{layer} does not know {name}"
    if top != "onnxgc" or not layer or rest == "__version__":
        return ""
    target = rest.partition(".")[0]
    # The package itself offers what api does.
    height = LAYERS.index(target) if target in LAYERS else LAYERS.index("api")
    if height < LAYERS.index(layer):
        return f"{layer} is below {LAYERS[height]} and may not import {module}"
    return ""


def inner_complaint(layer: str, folder: str, module: str) -> str:
    """Why a file in a folder of a layer may not import `module` from another folder of it, or ""."""
    order = FOLDERS[layer]
    if folder not in order:
        return f"'{layer}/{folder}' is no folder of {layer}; add it to FOLDERS"
    parts = module.split(".")
    if parts[:2] != ["onnxgc", layer] or len(parts) < 4 or parts[2] not in order:
        return ""
    if order.index(parts[2]) < order.index(folder):
        return f"{layer}/{folder} is below {layer}/{parts[2]} and may not import {module}"
    return ""


def prints(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="print")):
                yield node.lineno
            case ast.Attribute(value=ast.Name(id="sys"), attr="stdout" | "stderr"):
                yield node.lineno


def test_every_file_keeps_the_rules():
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    assert [text for path in files for text in violations(path, PACKAGE)] == []


@pytest.mark.parametrize(
    "file, source",
    [
        ("graph/a.py", "import onnx"),
        ("planning/a.py", "import onnx.helper as h"),
        ("solvers/a.py", "from onnxgc.gradients import rules"),
        ("gradients/a.py", "from onnxgc import solvers"),
        ("gradients/inner/a.py", "from ...solvers import registry"),
        ("errors.py", "from onnxgc.graph import segments"),
        ("emission/a.py", "if TYPE_CHECKING:\n    from onnxgc.api import optimize"),
        ("emission/a.py", "from onnxgc import optimize"),
        ("report/a.py", "import onnxgc"),
        ("emission/a.py", "importlib.import_module('torch.fx')"),
        ("__init__.py", "import torch"),
        ("report/a.py", "print('done')"),
        ("runtime/a.py", "sys.stdout.write('done')"),
        ("runtime/a.py", "def f():\n    from onnxgc.training import Trainer"),
        ("helpers.py", ""),
        ("model/core/a.py", "from onnxgc.model.files.load import load_proto"),
        ("solvers/paper/a.py", "from ..peak import solver"),
        ("model/other/a.py", "import numpy"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, source: str):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    assert len(violations(path, tmp_path)) == 1


@pytest.mark.parametrize(
    "file, source",
    [
        ("graph/a.py", "import networkx\nfrom onnxgc.errors import PlanError\nfrom . import segments"),
        ("solvers/a.py", "from onnxgc.planning.problem import CheckpointProblem\nfrom ..graph import tree"),
        ("runtime/a.py", "import onnxruntime\nfrom onnxgc.emission import barriers"),
        ("cli/a.py", "import onnxgc\nfrom onnxgc.api import optimize\nprint('done')"),
        ("__main__.py", "from onnxgc.cli.main import main"),
        ("model/files/a.py", "from onnxgc.model.core.ir import Node\nfrom onnxgc.model import read"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, source: str):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    assert violations(path, tmp_path) == []


def test_import_loads_no_optional_package():
    code = "import sys, onnxgc; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HOMES.keys() & result.stdout.split()


@pytest.mark.parametrize(
    "package, module, message",
    [
        ("torch", "torch", "onnxgc.torch needs PyTorch, which is not installed: pip install 'onnxgc[torch]'"),
        ("onnx_ir", "passes", "onnxgc.passes needs onnx_ir, which is not installed: pip install 'onnxgc[ir]'"),
    ],
)
def test_an_error_names_a_missing_package(package: str, module: str, message: str):
    code = f"""
import importlib.util as u; find = u.find_spec
u.find_spec = lambda name, *rest: None if name == "{package}" else find(name, *rest)
import onnxgc
try:
    import onnxgc.{module}
except onnxgc.OnnxgcError as error:
    print(error)"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == f"{message}\n"
