"""State files: parameters, running statistics and an optimizer's states in the safetensors format."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from onnxgc.emission.atomic_files import write_bytes
from onnxgc.emission.contract import CONTRACT_KEY
from onnxgc.errors import ModelFileError, OutputFileError
from onnxgc.model.core.ir import Array


def state_file(training: str | os.PathLike[str]) -> str:
    """The state file of a training file: `net.safetensors` beside `net.onnx`."""
    return os.fspath(Path(training).with_suffix(".safetensors"))


def write_arrays(arrays: Mapping[str, Array], metadata: Mapping[str, str], path: str | os.PathLike[str]) -> None:
    """Writes a safetensors file atomically.

    Raises:
        OutputFileError: the file cannot be written; an existing file is unchanged.
    """
    stored = {_as_stored(name): np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        contents = save(stored, dict(metadata))
    except SafetensorError as error:
        raise OutputFileError(f"cannot write '{os.fspath(path)}': {error}") from error
    write_bytes(contents, path)


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays and the metadata of a safetensors file.

    Raises:
        OSError, SafetensorError, ValueError: the file cannot be read.
    """
    with safe_open(os.fspath(path), framework="numpy") as stored:
        arrays = {_as_named(key): stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
        return arrays, dict(stored.metadata() or {})


def read_first_values(training: str | os.PathLike[str]) -> dict[str, Array]:
    """The first values of a training file whose state is not in the file itself.

    Raises:
        ModelFileError: the state file beside it is missing, or is none.
    """
    path = state_file(training)
    try:
        arrays, metadata = read_arrays(path)
        json.loads(metadata[CONTRACT_KEY])
    except FileNotFoundError as error:
        raise ModelFileError(
            f"'{os.fspath(training)}' has no first values: its state file '{path}' does not exist; keep both files "
            "of `onnxgc optimize --state inputs` in one folder"
        ) from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ModelFileError(f"'{path}' is not the state file of '{os.fspath(training)}': {one_line(error)}") from error
    return arrays


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def metadata_of(contract: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a state file."""
    return {CONTRACT_KEY: json.dumps(contract)}


def _as_stored(name: str) -> str:
    """A name that safetensors accepts: it reserves __metadata__."""
    return f"_{name}" if re.fullmatch("__+metadata__", name) else name


def _as_named(key: str) -> str:
    return key[1:] if re.fullmatch("___+metadata__", key) else key
