"""Exports common models with random weights into a folder outside the repository.

    python scripts/build_models.py --exports ORIGIN FOLDER [--only NAME] [--full] [--twins]

ORIGIN is torch (this environment, with torch, torchvision, timm, transformers and onnxscript), keras,
jax or paddle. The first export from one of these three creates an environment for it in FOLDER. With --twins,
each origin exports the same networks with the same weights, for comparisons.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Origin:
    """A framework in a separate environment: its script, and the packages that the script needs."""

    script: str
    requirements: tuple[str, ...]


ORIGINS: Mapping[str, Origin] = {
    "keras": Origin("keras_models.py", ("tensorflow-cpu==2.21.0", "keras==3.15.1", "tf2onnx==1.17.0")),
    "jax": Origin("jax_models.py", ("jax==0.10.2", "flax==0.12.8", "jax2onnx==0.17.1")),
    "paddle": Origin("paddle_models.py", ("paddlepaddle==3.3.1", "paddle2onnx==2.1.0", "setuptools<80")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="build_models.py --exports", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("origin", choices=["torch", *ORIGINS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", default=[], help="a torch model by name; repeatable")
    parser.add_argument("--full", action="store_true", help="torch models in full size")
    parser.add_argument("--twins", action="store_true", help="the same networks from each origin")
    options = parser.parse_args(arguments)
    if options.origin == "torch":
        return _torch(options)
    return _run_in_environment(ORIGINS[options.origin], options.folder, options.twins)


def _run_in_environment(origin: Origin, folder: Path, twins: bool = False) -> int:
    """Runs the script of an origin in its environment; returns the exit code."""
    environment = folder.resolve() / f".environment-{Path(origin.script).stem}"
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *origin.requirements]
        if status := subprocess.run(install).returncode:
            return status
    name = origin.script.replace("_models", "_twins") if twins else origin.script
    script = Path(__file__).resolve().parent / name
    return subprocess.run([str(python), str(script), str(folder)]).returncode


def _torch(options: argparse.Namespace) -> int:
    if options.twins:
        from scripts.exports.torch_twins import main as write_twins

        write_twins(options.folder)
        return 0
    from scripts.exports.export_all import export_all
    from scripts.exports.torch_export import exports_of, write_torch_model
    from scripts.exports.torch_models import TORCH_MODELS

    return export_all(
        (f"{name} {export.suffix}", partial(write_torch_model, name, model, options.folder, export, not options.full))
        for name, model in TORCH_MODELS.items()
        if not options.only or name in options.only
        for export in exports_of(model)
    )


if __name__ == "__main__":
    sys.exit(main())
