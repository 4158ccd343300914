"""Atomic writing of files: completely, or not at all."""

import hashlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import onnx

from onnxgc.errors import OutputFileError
from onnxgc.model.core.ir import Weight
from onnxgc.model.core.stored_weights import MIN_EXTERNAL_BYTES, StoredWeight, external_file, write_contents
from onnxgc.model.files.load import is_text

if sys.platform != "win32":
    import fcntl

# Protobuf is limited to 2 GiB. The file without its weights stays well below the difference.
MAX_SINGLE_FILE_BYTES = 2_000_000_000
# Runtimes map the file into memory.
_ALIGNMENT_BYTES = 4096


def data_file(path: str | os.PathLike[str]) -> str:
    """The file of a model's external weights."""
    return f"{os.fspath(path)}.data"


def check_writable(path: str | os.PathLike[str]) -> None:
    """Fails early, before any work is done.

    Raises:
        OutputFileError: the path is not a regular file, its folder does not exist, or it is not writable.
    """
    try:
        target = Path(path).resolve()
        folder = target.parent
        if target.is_dir():
            raise OutputFileError(f"cannot write '{path}': it is a directory; give a file name")
        if target.exists() and not target.is_file():
            raise OutputFileError(f"cannot write '{path}': it is not a regular file; give a file name")
        if not folder.is_dir():
            raise OutputFileError(f"cannot write '{path}': folder '{folder}' does not exist; create it first")
        if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
            raise OutputFileError(f"cannot write '{path}': permission denied; choose another location")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links, before 3.13
        raise OutputFileError(f"cannot write '{path}': {getattr(error, 'strerror', None) or error}") from error


def check_model_writable(path: str | os.PathLike[str]) -> None:
    """Fails early if a model cannot be written under this name.

    Raises:
        OutputFileError: as `check_writable`, or the name has the suffix of a text format.
    """
    if is_text(path):
        suffix = os.path.splitext(path)[1]
        raise OutputFileError(
            f"cannot write '{path}': the file is binary, and {suffix} is for text; give it the suffix .onnx"
        )
    check_writable(path)


def write_model(
    model: onnx.ModelProto,
    path: str | os.PathLike[str],
    *,
    external_data: bool = False,
    streamed: Mapping[str, Weight] = MappingProxyType({}),
    references: bool = False,
) -> tuple[Path, ...]:
    """Writes a model atomically; returns the files written.

    Weights go into `<name>.data` next to it with `external_data`, or if a single file would exceed protobuf's
    limit; `streamed` contains those that the model has without contents. With `references` weights of external
    files in the same folder stay there.
    Even if writing is interrupted, the model under that name reads the weights that it was written
    with. Symbolic links are followed.

    Raises:
        OutputFileError: the file cannot be written, its name has the suffix of a text format, or a referenced
            weight is in another folder; an earlier file of that name is unchanged.
    """
    check_model_writable(path)
    with _staging_folder(path) as (folder, target):
        written = folder / target.name
        weight_bytes = sum(len(tensor.raw_data) for tensor in model.graph.initializer if _is_large(tensor))
        if not streamed and not (external_data and weight_bytes) and weight_bytes <= MAX_SINGLE_FILE_BYTES:
            written.write_bytes(model.SerializeToString())
            os.replace(written, target)
            return (target,)
        data = Path(data_file(target))
        kept = _referenced(streamed, target.parent) if references else {}
        copied = [weight for name, weight in streamed.items() if name not in kept]
        _check_space(target.parent, path, weight_bytes + _bytes_on_disk(copied))
        with open(folder / data.name, "wb") as stream:
            shell = _externalize_weights(stream, model, data.name, streamed, kept)
        if not os.path.getsize(folder / data.name):
            written.write_bytes(shell.SerializeToString())
            os.replace(written, target)
            return (target,)
        temporaries = _temporary_names(data)
        temporary = temporaries[-1]
        if data.exists():
            # The earlier model reads `data` until it is replaced, so the new weights get another name first.
            os.replace(folder / data.name, temporary)
            written.write_bytes(_with_location(shell, temporary.name).SerializeToString())
            os.replace(written, target)
            data.unlink()
            try:
                # A copy, since ONNX rejects weight files with a second hard link.
                shutil.copyfile(temporary, folder / data.name)
            except OSError:
                return target, temporary
        os.replace(folder / data.name, data)
        written.write_bytes(shell.SerializeToString())
        os.replace(written, target)
        # In reverse, so that interruptions leave no gap in the numbers.
        for unread in reversed(temporaries):
            unread.unlink(missing_ok=True)
        return target, data


def _temporary_names(data: Path) -> list[Path]:
    """Temporary names of weight files: those left by interrupted writes, and the first free one."""
    names = [data.with_name(f"{data.name}.onnxgc-1")]
    while names[-1].exists():
        names.append(data.with_name(f"{data.name}.onnxgc-{len(names) + 1}"))
    return names


def _with_location(shell: onnx.ModelProto, location: str) -> onnx.ModelProto:
    """A copy that reads its weights from another file."""
    moved = onnx.ModelProto()
    moved.CopyFrom(shell)
    for tensor in moved.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    return moved


def without_contents(model: onnx.ModelProto) -> list[str]:
    """The weights whose contents `write_model` streams."""
    external = onnx.TensorProto.EXTERNAL
    return [t.name for t in model.graph.initializer if t.data_location == external and not t.external_data]


def _is_large(tensor: onnx.TensorProto) -> bool:
    # Shapes and axes stay in the model, since runtimes need their values for shape inference.
    return len(tensor.raw_data) >= MIN_EXTERNAL_BYTES


def _referenced(weights: Mapping[str, Weight], folder: Path) -> dict[str, dict[str, str]]:
    """The places of external weights, whose files have to be in `folder` or below."""
    places = {}
    for name, weight in weights.items():
        file = external_file(weight)
        if file is None or not isinstance(weight, StoredWeight):
            continue
        location = os.path.relpath(os.path.realpath(file), folder)
        if location.startswith(os.pardir):
            raise OutputFileError(
                f"weight '{name}' is in '{file}', which a file in '{folder}' cannot refer to; write it into the "
                "folder of the weights, or copy them (--weights copy)"
            )
        length = str(weight.type.size_bytes)
        places[name] = {"offset": "0", **weight.external_data, "location": location, "length": length}
    return places


def _bytes_on_disk(weights: Iterable[Weight]) -> int:
    """Bytes of weights in a new file, without the holes of files that are mostly holes."""
    sizes: Counter[str | None] = Counter()
    for weight in weights:
        sizes[external_file(weight)] += weight.type.size_bytes
    # A block has 512 bytes.
    return sum(size if file is None else min(size, os.stat(file).st_blocks * 512) for file, size in sizes.items())


def _check_space(folder: Path, path: str | os.PathLike[str], needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputFileError(
            f"cannot write '{path}': its weights have {needed:,} bytes, and {free:,} are free in '{folder}'; "
            "choose another folder, or --weights reference"
        )


def _externalize_weights(
    stream: BinaryIO,
    model: onnx.ModelProto,
    location: str,
    streamed: Mapping[str, Weight],
    kept: Mapping[str, Mapping[str, str]],
) -> onnx.ModelProto:
    """The model with its large weights written to `stream`, except `kept` ones; none is copied in memory."""
    graph = onnx.GraphProto(name=model.graph.name, doc_string=model.graph.doc_string)
    for field in ("node", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(model.graph, field))
    for tensor in model.graph.initializer:
        weight = streamed.get(tensor.name)
        if weight is None and not _is_large(tensor):
            graph.initializer.add().CopyFrom(tensor)
            continue
        outside = graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        outside.data_location = onnx.TensorProto.EXTERNAL
        place: dict[str, Any] = {"location": location, "offset": stream.tell()}
        if tensor.name in kept:
            place = dict(kept[tensor.name])
        elif weight is None:
            place["length"] = stream.write(tensor.raw_data)
        else:
            place["length"] = write_contents(weight, stream)
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
    """Writes a text file atomically.

    Raises:
        OutputFileError: as `write_model`.
    """
    write_bytes(text.encode(), path)


def write_bytes(contents: bytes, path: str | os.PathLike[str]) -> None:
    """Writes a file atomically, flushed to disk on return.

    Raises:
        OutputFileError: as `write_model`.
    """
    with _staging_folder(path) as (folder, target):
        written = folder / target.name
        with open(written, "wb") as stream:
            stream.write(contents)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(written, target)


def _lock(folder: Path) -> int | None:
    """The descriptor that locks a temporary folder, until it is closed or its process ends.

    None if another run has the lock, the folder is gone, or the platform has no such locks.
    """
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


@contextmanager
def _staging_folder(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """A temporary folder next to the target, and the target with links resolved."""
    check_writable(path)
    target = Path(path).resolve()
    prefix = f".onnxgc-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"
    try:
        for left in target.parent.glob(f"{prefix}*"):
            if (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        while True:
            with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as folder:
                lock = _lock(Path(folder))
                if lock is None and sys.platform != "win32" and not os.path.isdir(folder):
                    continue  # Another run removed it between its creation and its lock.
                try:
                    yield Path(folder), target
                finally:
                    if lock is not None:
                        os.close(lock)
                return
    except OSError as error:
        raise OutputFileError(f"cannot write '{path}': {error.strerror or error}") from error
