"""Writing results so that nothing is lost: whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import onnx

from onnxgc.errors import OutputFileError
from onnxgc.model.files.load import is_text

# Protobuf holds no more; the rest of the file stays well below the difference.
_LARGEST_SINGLE_FILE_BYTES = 2_000_000_000
_SMALLEST_OUTSIDE_BYTES = 1024
# Runtimes map the file into memory.
_ALIGNMENT_BYTES = 4096


def data_file(path: str | os.PathLike[str]) -> str:
    """Where the weights of a model go that are not in its own file."""
    return f"{os.fspath(path)}.data"


def check_writable(path: str | os.PathLike[str]) -> None:
    """Fail early, before any work is done.

    Raises:
        OutputFileError: the path is no regular file, its folder does not exist, or it may not be
            written.
    """
    try:
        target = Path(path).resolve()
        folder = target.parent
        if target.is_dir():
            raise OutputFileError(f"cannot write '{path}': it is a directory; give a file name")
        if target.exists() and not target.is_file():
            raise OutputFileError(f"cannot write '{path}': it is no regular file; give a file name")
        if not folder.is_dir():
            raise OutputFileError(f"cannot write '{path}': folder '{folder}' does not exist; create it first")
        if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
            raise OutputFileError(f"cannot write '{path}': permission denied; choose another place")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links, before 3.13
        raise OutputFileError(
            f"cannot write '{path}': {getattr(error, 'strerror', None) or error}"
        ) from error


def check_model_writable(path: str | os.PathLike[str]) -> None:
    """Fail early where a model cannot be written: its file is binary, and its name must not say otherwise.

    Raises:
        OutputFileError: as `check_writable`, or the name has the suffix of a text form.
    """
    if is_text(path):
        suffix = os.path.splitext(path)[1]
        raise OutputFileError(
            f"cannot write '{path}': the file is binary, and {suffix} is for text; give it a name with .onnx"
        )
    check_writable(path)


def write_model(
    model: onnx.ModelProto, path: str | os.PathLike[str], *, external_data: bool = False
) -> tuple[Path, ...]:
    """Write a model under its final name only when it is complete; returns the files written.

    Weights go into `<name>.data` beside it where asked for or where one file cannot hold them; whenever
    the writing ends, the model reads the weights that it was written with. A symbolic link is followed.

    Raises:
        OutputFileError: the file cannot be written, or its name is that of a text form; an earlier file
            of that name is untouched.
    """
    check_model_writable(path)
    with _complete_only(path) as (folder, target):
        written = folder / target.name
        outside = [tensor.name for tensor in model.graph.initializer if _is_large(tensor)]
        if not outside or not (external_data or model.ByteSize() > _LARGEST_SINGLE_FILE_BYTES):
            written.write_bytes(model.SerializeToString())
            os.replace(written, target)
            return (target,)
        data = Path(data_file(target))
        with open(folder / data.name, "wb") as stream:
            shell = _with_weights_in(stream, model, data.name)
        spares = _spares(data)
        spare = spares[-1]
        if data.exists():
            # An earlier model may read it: until that is gone these weights lie under another name.
            os.replace(folder / data.name, spare)
            written.write_bytes(_reading(shell, spare.name).SerializeToString())
            os.replace(written, target)
            data.unlink()
            try:
                # No link: ONNX reads no weights that have two names.
                shutil.copyfile(spare, folder / data.name)
            except OSError:
                return target, spare
        os.replace(folder / data.name, data)
        written.write_bytes(shell.SerializeToString())
        os.replace(written, target)
        # The last first: there is never one behind a name that is free.
        for unread in reversed(spares):
            unread.unlink(missing_ok=True)
        return target, data


def _spares(data: Path) -> list[Path]:
    """Other names for weights: those that writings left when they were cut off, and last one that is free."""
    spares = [data.with_name(f"{data.name}.onnxgc-1")]
    while spares[-1].exists():
        spares.append(data.with_name(f"{data.name}.onnxgc-{len(spares) + 1}"))
    return spares


def _reading(shell: onnx.ModelProto, location: str) -> onnx.ModelProto:
    """A copy that reads its weights elsewhere."""
    moved = onnx.ModelProto()
    moved.CopyFrom(shell)
    for tensor in moved.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    return moved


def _is_large(tensor: onnx.TensorProto) -> bool:
    # Shapes and axes stay inside: a runtime wants to see them while it infers shapes.
    return len(tensor.raw_data) >= _SMALLEST_OUTSIDE_BYTES


def _with_weights_in(stream: BinaryIO, model: onnx.ModelProto, location: str) -> onnx.ModelProto:
    """The model with its large weights in another file; neither the model nor a copy of them is made."""
    graph = onnx.GraphProto(name=model.graph.name, doc_string=model.graph.doc_string)
    for field in ("node", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(model.graph, field))
    for tensor in model.graph.initializer:
        if not _is_large(tensor):
            graph.initializer.add().CopyFrom(tensor)
            continue
        outside = graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        outside.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": location, "offset": stream.tell(), "length": stream.write(tensor.raw_data)}
        for key, value in place.items():
            outside.external_data.add(key=key, value=str(value))
        stream.write(bytes(-stream.tell() % _ALIGNMENT_BYTES))
    return onnx.ModelProto(
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        opset_import=model.opset_import,
        metadata_props=model.metadata_props,
        graph=graph,
    )


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a text file whole or not at all.

    Raises:
        OutputFileError: as `write_model`.
    """
    write_bytes(text.encode(), path)


def write_bytes(contents: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all, on the disk when this returns.

    Raises:
        OutputFileError: as `write_model`.
    """
    with _complete_only(path) as (folder, target):
        written = folder / target.name
        with open(written, "wb") as stream:
            stream.write(contents)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(written, target)


@contextmanager
def _complete_only(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """A folder beside the target to write in, and the target itself."""
    check_writable(path)
    target = Path(path).resolve()
    try:
        with tempfile.TemporaryDirectory(prefix=".onnxgc-", dir=target.parent) as folder:
            yield Path(folder), target
    except OSError as error:
        raise OutputFileError(f"cannot write '{path}': {error.strerror or error}") from error
