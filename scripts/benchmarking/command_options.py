"""Options of a benchmark: the fields of its dataclass `Options`, on the command line."""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

CORES = os.cpu_count() or 1
_HELP: Mapping[str, str] = {
    "all_exports": "static and symbolic batch by each exporter",
    "files": "ONNX files below this folder in place of PyTorch models",
    "folder": "output of build_models.py --exports ORIGIN FOLDER --twins",
    "graphs": "a folder of operator graphs (JSON), or their number",
    "network": "a network of models/",
    "only": "a network, model or graph by name; repeatable",
    "pixels": "image size",
    "rounds": "timed steps",
    "small": "small networks, for a trial",
    "threads": "threads of each operator",
    "time_limit": "seconds of each search",
    "verify": "run `onnxgc verify`",
}


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Adds a field without a default as an argument, and each other field as an option."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        # The type of `int | None` is the first of both.
        hint, text, default = (get_args(hints[field.name]) or (hints[field.name],))[0], _HELP.get(field.name), None
        if field.default is dataclasses.MISSING:
            parser.add_argument(field.name, type=hint, help=text)
            continue
        how: dict[str, Any] = {"type": hint, "default": (default := field.default)}
        if hint is bool:
            how = {"action": argparse.BooleanOptionalAction, "default": default}
        elif default == ():
            how = {"action": "append", "default": []}
        shown = "" if default in (None, ()) else f" (default: {default})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=f"{text or ''}{shown}", **how)


def options_of(kind: type[Any], arguments: argparse.Namespace) -> Any:
    """The dataclass with the values of a command line."""
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def add_record_folder(parser: argparse.ArgumentParser, default: Path) -> None:
    parser.add_argument("--record", type=Path, default=default, help="folder for the JSON file")
