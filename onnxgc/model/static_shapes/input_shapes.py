"""Static shapes of a model's inputs, from its declarations and from --input-shapes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnxgc.errors import ShapeError
from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import TensorType

_UNNAMED = "?"


@dataclass(frozen=True, slots=True)
class FileShapes:
    """The input types that the file declares.

    `batch` is the first dimension in the file and after reading, where they differ.
    """

    types: Mapping[str, TensorType]
    batch: tuple[int, int] | None


def with_input_shapes(
    draft: Draft, input_shapes: Mapping[str, tuple[int, ...]] | None
) -> tuple[Draft, FileShapes | None]:
    """The draft with a static type for every input, and the file's types where they differ.

    Raises:
        ShapeError: a shape is given for an unknown input, has the wrong rank or a size below 1,
            or an input is not a tensor or has no declared rank.
    """
    given = dict(input_shapes or {})
    for name in given:
        if name not in draft.inputs:
            known = ", ".join(f"'{known}'" for known in draft.inputs) or "none"
            raise ShapeError(f"--input-shapes names '{name}', which is not an input; the inputs are: {known}")
    declared_shapes = {name: _declared_shape(name, draft.declared[name]) for name in draft.inputs}
    known_sizes = _sizes_of_symbols(declared_shapes, given)
    notes: list[str] = []
    types: dict[str, TensorType] = {}
    types_in_file: dict[str, TensorType] = {}
    for name, declared in declared_shapes.items():
        shape = _choose_shape(name, declared, given.get(name), known_sizes, notes)
        dtype = draft.declared[name].tensor_type.elem_type
        types[name] = TensorType(dtype, shape)
        types_in_file[name] = TensorType(dtype, _literal_sizes(declared, shape))
    firsts = ((types_in_file[name].shape[:1], types[name].shape[:1]) for name in draft.inputs)
    batch = next(((old[0], new[0]) for old, new in firsts if old != new), None)
    if batch is not None:
        unchanged = (name for name, kind in types.items() if name not in given and kind.shape[:1] == batch[:1])
        notes += (_unchanged_batch_note(name, types[name].shape, batch) for name in unchanged)
    file = FileShapes(types_in_file, batch) if types_in_file != types else None
    # Declared inner shapes belong to the file's own input shapes.
    declared_types = {name: kind for name, kind in draft.declared.items() if file is None or name in types}
    return draft.with_changes(types=types, declared=declared_types).with_notes(*notes), file


def _unchanged_batch_note(name: str, shape: tuple[int, ...], batch: tuple[int, int]) -> str:
    template = ",".join(map(str, (batch[1], *shape[1:])))
    return (
        f"input '{name}' keeps the file's first dimension of {batch[0]}, while that of another input becomes "
        f"{batch[1]}; if it holds samples too, pass --input-shapes {name}:{template}"
    )


def _declared_shape(name: str, declared: onnx.TypeProto) -> list[int | str] | None:
    if not declared.HasField("tensor_type"):
        raise ShapeError(f"input '{name}' is not a tensor; models with sequence or optional inputs are not supported")
    if not declared.tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or _UNNAMED
        for dim in declared.tensor_type.shape.dim
    ]


def _sizes_of_symbols(
    declared: Mapping[str, Sequence[int | str] | None], given: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Sizes of symbolic dimensions that follow from the given shapes without contradiction."""
    sizes_of = defaultdict[str, set[int]](set)
    for name, shape in given.items():
        for size, dimension in zip(shape, declared[name] or (), strict=False):
            if isinstance(dimension, str) and dimension != _UNNAMED:
                sizes_of[dimension].add(size)
    return {dimension: next(iter(sizes)) for dimension, sizes in sizes_of.items() if len(sizes) == 1}


def _literal_sizes(declared: Sequence[int | str] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The positive sizes that the file declares, completed by those of `shape`."""
    if declared is None:
        return shape
    return tuple(
        size if isinstance(size, int) and size else chosen for size, chosen in zip(declared, shape, strict=True)
    )


def _choose_shape(
    name: str,
    declared: list[int | str] | None,
    given: tuple[int, ...] | None,
    known_sizes: Mapping[str, int],
    notes: list[str],
) -> tuple[int, ...]:
    """The shape of an input; appends a note for each guess to `notes`."""
    if given is not None:
        return _checked_shape(name, declared, given)
    if declared is None:
        raise ShapeError(f"input '{name}' has no declared shape; pass --input-shapes {name}:SIZE,SIZE,...")
    symbols = [size for size in dict.fromkeys(declared) if isinstance(size, str)]
    notes += [
        f"input '{name}': dimension '{size}' is set to {known_sizes[size]}, as given for another input"
        for size in symbols
        if size in known_sizes
    ]
    shape = tuple(size if isinstance(size, int) else known_sizes.get(size, 1) for size in declared)
    if 0 in shape:
        # Valid ONNX, but some exporters write 0 for an unknown size.
        template = ",".join("N" if size == 0 else str(size) for size in shape)
        notes.append(f"input '{name}' is declared empty, {list(shape)}; pass --input-shapes {name}:{template}")
    unknown = [size for size in declared if isinstance(size, str) and size not in known_sizes]
    if unknown:
        template = ",".join(str(known_sizes.get(str(size), size)) for size in declared)
        listed = ", ".join(repr(size) for size in unknown)
        which = f"dimension {listed} is" if len(unknown) == 1 else f"dimensions {listed} are"
        notes.append(f"input '{name}': {which} set to 1; pass --input-shapes {name}:{template}")
    return shape


def _checked_shape(name: str, declared: Sequence[int | str] | None, given: tuple[int, ...]) -> tuple[int, ...]:
    if declared is not None and len(given) != len(declared):
        raise ShapeError(
            f"--input-shapes gives input '{name}' {len(given)} dimensions ({list(given)}), "
            f"but it has {len(declared)} ([{', '.join(map(str, declared))}]); give a size for each"
        )
    if any(size < 1 for size in given):
        raise ShapeError(f"--input-shapes gives input '{name}' the shape {list(given)}; sizes must be at least 1")
    return tuple(int(size) for size in given)
