"""Writing results so that nothing is lost: whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx

from onnxgc.errors import OutputFileError

# Protobuf holds no more; the rest of the file stays well below the difference.
_LARGEST_SINGLE_FILE_BYTES = 2_000_000_000


def check_writable(path: str | os.PathLike[str]) -> None:
    """Fail early, before any work is done.

    Raises:
        OutputFileError: the path is a directory, its folder does not exist, or may not be written.
    """
    target = Path(path)
    if target.is_dir():
        raise OutputFileError(f"cannot write '{target}': it is a directory; give a file name")
    folder = target.parent
    if not folder.is_dir():
        raise OutputFileError(f"cannot write '{target}': folder '{folder}' does not exist; create it first")
    if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise OutputFileError(f"cannot write '{target}': permission denied; choose another place")


def write_model(
    model: onnx.ModelProto, path: str | os.PathLike[str], *, external_data: bool = False
) -> tuple[Path, ...]:
    """Write a model under its final name only when it is complete; returns the files written.

    Weights go into `<name>.data` beside it where asked for or where one file cannot hold them.

    Raises:
        OutputFileError: the file cannot be written; an earlier file of that name is untouched.
    """
    check_writable(path)
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".onnxgc-", dir=target.parent) as folder:
            written = Path(folder) / target.name
            data_name = f"{target.name}.data"
            if external_data or model.ByteSize() > _LARGEST_SINGLE_FILE_BYTES:
                onnx.save_model(
                    model, written, save_as_external_data=True, location=data_name, size_threshold=1024
                )
                os.replace(Path(folder) / data_name, target.parent / data_name)
                os.replace(written, target)
                return target, target.parent / data_name
            written.write_bytes(model.SerializeToString())
            os.replace(written, target)
    except OSError as error:
        raise OutputFileError(f"cannot write '{target}': {error.strerror or error}") from error
    return (target,)


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a text file whole or not at all.

    Raises:
        OutputFileError: as `write_model`.
    """
    check_writable(path)
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".onnxgc-", dir=target.parent) as folder:
            written = Path(folder) / target.name
            written.write_text(text)
            os.replace(written, target)
    except OSError as error:
        raise OutputFileError(f"cannot write '{target}': {error.strerror or error}") from error
