"""Export models that people train, with random weights, into a folder.

python -m scripts.exports torch FOLDER [--only NAME] [--full]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("origin", choices=["torch"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", default=[], help="a model by name; repeatable")
    parser.add_argument("--full", action="store_true", help="in the size that is trained")
    options = parser.parse_args(arguments)
    return _torch(options)


def _torch(options: argparse.Namespace) -> int:
    from scripts.exports.torch_export import exports_of, write_torch_model
    from scripts.exports.torch_models import TORCH_MODELS

    failed = 0
    for name, model in TORCH_MODELS.items():
        if options.only and name not in options.only:
            continue
        for export in exports_of(model):
            try:
                print(write_torch_model(name, model, options.folder, export, not options.full), flush=True)
            except Exception as error:
                # Exporters fail in many ways of their own; the others are still wanted.
                reason = next(iter(str(error).splitlines()), "")
                print(f"{name} {export.suffix}: {type(error).__name__}: {reason}", flush=True)
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
