"""Options of benchmarks: those that several have, and their values."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any, TypeVar, cast

from scripts.benchmarking.records import BENCHMARKS

Options = TypeVar("Options")


def options_of(kind: type[Options], arguments: argparse.Namespace) -> Options:
    """The fields of a dataclass from a command line; fields without an option keep their defaults."""
    given = vars(arguments)
    names = [field.name for field in dataclasses.fields(cast(Any, kind)) if field.name in given]
    return kind(**{name: tuple(given[name]) if name == "only" else given[name] for name in names})


def add_record_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, default=BENCHMARKS, help="folder for the JSON file")


def add_threads(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    """`default`: the number of cores if `None`."""
    shown = "cores" if default is None else str(default)
    parser.add_argument(
        "--threads",
        type=int,
        default=default or os.cpu_count() or 1,
        help=f"threads of each operator (default: {shown})",
    )


def add_only(parser: argparse.ArgumentParser, kind: str = "a network") -> None:
    parser.add_argument("--only", action="append", default=[], help=f"{kind} by name; repeatable")


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--rounds", type=int, default=default, help=f"timed steps (default: {default})")


def add_small(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="small networks, for a trial")


def add_time_limit(parser: argparse.ArgumentParser, default: float | None) -> None:
    shown = "the solver's own" if default is None else f"{default:g}"
    parser.add_argument("--time-limit", type=float, default=default, help=f"seconds of each search (default: {shown})")


def add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", default="resnet50", help="a network of models/")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pixels", type=int, default=224)
