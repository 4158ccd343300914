"""Exports common models with random weights into a folder outside the repository.

    python scripts/build_models.py --exports ORIGIN FOLDER [--only NAME] [--full] [--twins]

ORIGIN is torch (this environment, with torch, torchvision, timm, transformers and onnxscript), keras,
jax or paddle. The first export from one of these three creates an environment for it in FOLDER. With --twins,
each origin exports the same networks with the same weights, for comparisons.
"""

import argparse
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "keras": ("tensorflow-cpu==2.21.0", "keras==3.15.1", "tf2onnx==1.17.0"),
    "jax": ("jax==0.10.2", "flax==0.12.8", "jax2onnx==0.17.1"),
    "paddle": ("paddlepaddle==3.3.1", "paddle2onnx==2.1.0", "setuptools<80"),
}
"""Packages of the separate environment of each framework."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="build_models.py --exports", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("origin", choices=["torch", *REQUIREMENTS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", default=[], help="a torch model by name; repeatable")
    parser.add_argument("--full", action="store_true", help="torch models in full size")
    parser.add_argument("--twins", action="store_true", help="the same networks from each origin")
    options = parser.parse_args(arguments)
    if options.origin == "torch" and not options.twins:
        return _torch(options)
    python = sys.executable
    if options.origin != "torch":
        environment = options.folder.resolve() / f".environment-{options.origin}_models"
        python = str(environment / ("Scripts" if sys.platform == "win32" else "bin") / "python")
        if not Path(python).exists():
            venv.create(environment, with_pip=True)
            install = [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[options.origin]]
            if status := subprocess.run(install).returncode:
                return status
    module = f"scripts.exports.{options.origin}_{'twins' if options.twins else 'models'}"
    return subprocess.run([python, "-m", module, str(options.folder.resolve())], cwd=ROOT).returncode


def _torch(options: argparse.Namespace) -> int:
    from scripts.exports.export_all import export_all
    from scripts.exports.torch_export import exports_of, write_torch_model
    from scripts.exports.torch_models import TORCH_MODELS

    size = "full" if options.full else "small"
    return export_all(
        (
            options.folder / f"{name}-{size}-{export.suffix}.onnx",
            partial(write_torch_model, model=model, export=export, small=not options.full),
        )
        for name, model in TORCH_MODELS.items()
        if not options.only or name in options.only
        for export in exports_of(model)
    )


if __name__ == "__main__":
    sys.exit(main())
